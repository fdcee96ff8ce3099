//! Who this member is (I4): its node id and data directory, and the cluster and history it belongs to. Kept in one
//! small file that is replaced atomically, and compared with the peer's on every connection.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use parking_lot::{Mutex, RwLock};
use tidepool_proto::{ClusterId, Error, ErrorCode, History, NodeId, PROTOCOL_VERSION, v1};

use crate::log::StoreId;

/// File in the data directory.
const FILE: &str = "identity";
const TITLE: &str = "tidepool-master-identity 1";

/// The cluster, and this life of its directory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct ClusterIdentity {
    /// Drawn once, at bootstrap.
    pub cluster: ClusterId,
    /// Drawn at bootstrap and at every restore.
    pub history: History,
}

impl std::fmt::Display for ClusterIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cluster {} history {:016x}", self.cluster, self.history.0)
    }
}

/// What the file holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    /// The member whose directory this is.
    pub node_id: NodeId,
    /// The directory's log store.
    pub store: StoreId,
    /// None until a bootstrap or a join named it.
    pub cluster: Option<ClusterIdentity>,
    /// Whether this directory ever took part: its log and vote must not be missing then.
    pub took_part: bool,
    /// Directories of the initial members, as agreed at bootstrap.
    pub roster: BTreeMap<NodeId, StoreId>,
}

/// The record in memory and on disk.
#[derive(Debug)]
pub struct IdentityStore {
    path: PathBuf,
    /// Held across the disk by whoever changes the record; `record` only for the change in memory.
    changes: Mutex<()>,
    record: RwLock<Record>,
}

impl IdentityStore {
    /// Reads the directory's identity, or makes one for a new directory. The log store beside it must be `store`; a
    /// directory of another node id is refused.
    pub fn open(dir: &Path, node_id: NodeId, store: StoreId, new_directory: bool) -> Result<IdentityStore, Error> {
        let path = dir.join(FILE);
        let failed =
            |e: io::Error| Error::new(ErrorCode::StorageFailed, format!("identity file {}: {e}", path.display()));
        let record = match fs::read_to_string(&path) {
            Ok(text) => parse(&text).map_err(|why| {
                let message = format!(
                    "identity file {}: {why}; restore it from a backup or join under a new node id",
                    path.display()
                );
                Error::new(ErrorCode::StorageCorrupt, message)
            })?,
            Err(e) if e.kind() == io::ErrorKind::NotFound && !new_directory => {
                let message = format!(
                    "{} is missing although the log beside it is in use; restore it from a backup",
                    path.display()
                );
                return Err(Error::new(ErrorCode::StorageCorrupt, message));
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let record = Record { node_id, store, cluster: None, took_part: false, roster: BTreeMap::new() };
                write(&path, &record).map_err(failed)?;
                record
            }
            Err(e) => return Err(failed(e)),
        };
        if record.store != store {
            let message = format!(
                "the log in {} is not the one this member joined with (store {store}, expected {}); a member that lost its \
                 log must not vote: move its data directory away and join as a learner under a new node id",
                dir.display(),
                record.store
            );
            return Err(Error::new(ErrorCode::StorageCorrupt, message));
        }
        if record.node_id != node_id {
            let message = format!(
                "data directory {} belongs to node {}, this is node {node_id}; start with the node's own directory or an empty one",
                dir.display(),
                record.node_id
            );
            return Err(Error::new(ErrorCode::WrongCluster, message));
        }
        Ok(IdentityStore { path, changes: Mutex::default(), record: RwLock::new(record) })
    }

    /// The identity of a directory in use, whoever's it is; the log store beside it must be `store`.
    #[cfg(feature = "rocksdb")]
    pub(crate) fn reopen(dir: &Path, store: StoreId) -> Result<IdentityStore, Error> {
        let path = dir.join(FILE);
        let corrupt =
            |why: String| Error::new(ErrorCode::StorageCorrupt, format!("identity file {}: {why}", path.display()));
        let text = fs::read_to_string(&path).map_err(|error| corrupt(error.to_string()))?;
        let record = parse(&text).map_err(corrupt)?;
        IdentityStore::open(dir, record.node_id, store, false)
    }

    /// The record as it is now.
    pub fn record(&self) -> Record {
        self.record.read().clone()
    }

    /// Cluster and history; zeros before they are known.
    pub fn cluster(&self) -> ClusterIdentity {
        self.record.read().cluster.unwrap_or_default()
    }

    /// Changes the record durably: written and synced before it is seen. Blocks on the disk.
    pub fn update(&self, change: impl FnOnce(&mut Record)) -> io::Result<()> {
        let _one_at_a_time = self.changes.lock();
        let before = self.record();
        let mut next = before.clone();
        change(&mut next);
        if next != before {
            write(&self.path, &next)?;
            *self.record.write() = next;
        }
        Ok(())
    }

    /// What this member says about itself on the wire.
    pub fn to_wire(&self) -> v1::Identity {
        let record = self.record.read();
        v1::Identity {
            cluster_uuid: record.cluster.map_or_else(Bytes::new, |c| Bytes::copy_from_slice(&c.cluster.0)),
            history: record.cluster.map_or(0, |c| c.history.0),
            node_id: record.node_id.0,
            protocol_version: PROTOCOL_VERSION,
            build: env!("CARGO_PKG_VERSION").to_owned(),
            ancestors: Vec::new(),
        }
    }

    /// This directory's UUID, for the wire.
    pub fn store_uuid(&self) -> Bytes {
        store_to_wire(self.record.read().store)
    }

    /// Whether a call from `peer`, meant for `target`, may reach consensus: same cluster, history and protocol, the
    /// directory that was agreed on, and really meant for this member.
    pub fn admit(&self, peer: Option<&v1::Identity>, target: u64, store_uuid: &[u8]) -> Result<(), Error> {
        let wrong = |message: String| Err(Error::new(ErrorCode::WrongCluster, message));
        let Some(peer) = peer else {
            return wrong("the caller did not say who it is".to_owned());
        };
        let record = self.record.read();
        check_protocol(peer)?;
        if target != record.node_id.0 {
            return wrong(format!(
                "the caller wants node {target}, this is node {}; check the members' addresses",
                record.node_id
            ));
        }
        let Some(own) = record.cluster else {
            return wrong(format!("node {} belongs to no cluster yet", record.node_id));
        };
        let theirs = wire_cluster(peer);
        if theirs != Some(own) {
            let theirs = theirs.map_or_else(|| "no cluster".to_owned(), |c| c.to_string());
            return wrong(format!(
                "node {} belongs to {own}, the caller (node {}) to {theirs}",
                record.node_id, peer.node_id
            ));
        }
        if peer.node_id == record.node_id.0 {
            return wrong(format!("the caller claims to be node {} as well; node ids are never shared", peer.node_id));
        }
        match record.roster.get(&NodeId(peer.node_id)) {
            Some(agreed) if agreed.0.to_be_bytes()[..] != *store_uuid => wrong(format!(
                "node {} speaks from another data directory than the one it joined with; a wiped member joins again under a new node id",
                peer.node_id
            )),
            _ => Ok(()),
        }
    }
}

/// Refuses a protocol version more than one away.
pub fn check_protocol(peer: &v1::Identity) -> Result<(), Error> {
    if peer.protocol_version.abs_diff(PROTOCOL_VERSION) <= 1 {
        return Ok(());
    }
    let message = format!(
        "node {} speaks protocol {} (build {}), this one {PROTOCOL_VERSION}; versions further apart than one do not mix",
        peer.node_id, peer.protocol_version, peer.build
    );
    Err(Error::new(ErrorCode::WrongCluster, message))
}

/// The cluster a peer says it belongs to.
pub fn wire_cluster(peer: &v1::Identity) -> Option<ClusterIdentity> {
    let cluster = ClusterId(peer.cluster_uuid[..].try_into().ok()?);
    Some(ClusterIdentity { cluster, history: History(peer.history) })
}

/// The directory a peer speaks from.
pub fn wire_store(bytes: &[u8]) -> Option<StoreId> {
    Some(StoreId(u128::from_be_bytes(bytes.try_into().ok()?)))
}

/// A directory's UUID as it travels.
pub fn store_to_wire(store: StoreId) -> Bytes {
    Bytes::copy_from_slice(&store.0.to_be_bytes())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut out, byte| {
        let _ = write!(out, "{byte:02x}");
        out
    })
}

fn unhex(text: &str) -> Option<[u8; 16]> {
    let value = (text.len() == 32).then(|| u128::from_str_radix(text, 16).ok()).flatten()?;
    Some(value.to_be_bytes())
}

fn render(record: &Record) -> String {
    let mut text = format!("{TITLE}\nnode {}\nstore {}\n", record.node_id, record.store);
    if let Some(cluster) = record.cluster {
        let _ = writeln!(text, "cluster {}\nhistory {:016x}", hex(&cluster.cluster.0), cluster.history.0);
    }
    let _ = writeln!(text, "took_part {}", record.took_part);
    for (id, store) in &record.roster {
        let _ = writeln!(text, "member {id} {store}");
    }
    let checksum = crc32c::crc32c(text.as_bytes());
    let _ = writeln!(text, "checksum {checksum:08x}");
    text
}

fn parse(text: &str) -> Result<Record, String> {
    let (body, checksum) = text.rsplit_once("checksum ").ok_or("it has no checksum line")?;
    if checksum.trim_end() != format!("{:08x}", crc32c::crc32c(body.as_bytes())) {
        return Err("its checksum is wrong".to_owned());
    }
    let mut lines = body.lines();
    if lines.next() != Some(TITLE) {
        return Err("it is of another version of this program".to_owned());
    }
    let (mut node, mut store, mut cluster, mut history, mut took_part) = (None, None, None, None, None);
    let mut roster = BTreeMap::new();
    for line in lines {
        let bad = || format!("line '{line}' is not understood");
        let (key, value) = line.split_once(' ').ok_or_else(bad)?;
        match key {
            "node" => node = Some(NodeId(value.parse().map_err(|_| bad())?)),
            "store" => store = Some(value.parse::<StoreId>()?),
            "cluster" => cluster = Some(ClusterId(unhex(value).ok_or_else(bad)?)),
            "history" => history = Some(History(u64::from_str_radix(value, 16).map_err(|_| bad())?)),
            "took_part" => took_part = Some(value.parse().map_err(|_| bad())?),
            "member" => {
                let (id, uuid) = value.split_once(' ').ok_or_else(bad)?;
                roster.insert(NodeId(id.parse().map_err(|_| bad())?), uuid.parse::<StoreId>()?);
            }
            _ => return Err(bad()),
        }
    }
    let cluster = match (cluster, history) {
        (Some(cluster), Some(history)) => Some(ClusterIdentity { cluster, history }),
        (None, None) => None,
        _ => return Err("it names a cluster without history, or the reverse".to_owned()),
    };
    Ok(Record {
        node_id: node.ok_or("it names no node")?,
        store: store.ok_or("it names no store")?,
        cluster,
        took_part: took_part.ok_or("it does not say whether the member took part")?,
        roster,
    })
}

fn write(path: &Path, record: &Record) -> io::Result<()> {
    let temporary = path.with_extension("tmp");
    let mut file = File::create(&temporary)?;
    file.write_all(render(record).as_bytes())?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    let dir = path.parent().ok_or_else(|| io::Error::other("the identity file has no directory"))?;
    File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STORE_1: StoreId = StoreId(0x0808_0808_0808_0808_0808_0808_0808_0808);
    const STORE_2: StoreId = StoreId(0x0707_0707_0707_0707_0707_0707_0707_0707);

    fn record() -> Record {
        Record {
            node_id: NodeId(2),
            store: STORE_2,
            cluster: Some(ClusterIdentity { cluster: ClusterId([1; 16]), history: History(99) }),
            took_part: true,
            roster: BTreeMap::from([(NodeId(1), STORE_1), (NodeId(2), STORE_2)]),
        }
    }

    #[test]
    fn record_round_trips_and_any_change_is_noticed() {
        let text = render(&record());
        assert_eq!(parse(&text), Ok(record()));
        for at in 0..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[at] ^= 1;
            if let Ok(changed) = String::from_utf8(bytes) {
                // Only the final newline carries nothing.
                assert!(at == text.len() - 1 || parse(&changed) != Ok(record()), "byte {at} changed unnoticed");
                assert!(at == text.len() - 1 || parse(&changed).is_err(), "byte {at} changed and was believed");
            }
            assert!(at == 0 || at == text.len() - 1 || parse(&text[..at]).is_err(), "cut at {at} was believed");
        }
    }

    #[test]
    fn another_nodes_directory_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        IdentityStore::open(dir.path(), NodeId(1), STORE_1, true).unwrap();
        let error = IdentityStore::open(dir.path(), NodeId(1), STORE_2, true).unwrap_err();
        assert_eq!(error.code(), ErrorCode::StorageCorrupt, "a lost log");
        let error = IdentityStore::open(dir.path(), NodeId(2), STORE_1, true).unwrap_err();
        assert_eq!(error.code(), ErrorCode::WrongCluster);
        assert!(error.message().contains("node 1"), "{error}");
    }

    #[test]
    fn only_the_agreed_members_of_this_cluster_are_admitted() {
        let dir = tempfile::tempdir().unwrap();
        let store = IdentityStore::open(dir.path(), NodeId(2), STORE_2, true).unwrap();
        let peer = v1::Identity {
            cluster_uuid: Bytes::copy_from_slice(&[1; 16]),
            history: 99,
            node_id: 1,
            protocol_version: PROTOCOL_VERSION,
            build: String::new(),
            ancestors: Vec::new(),
        };
        let dir_of_1: &[u8] = &[8; 16];
        assert!(store.admit(Some(&peer), 2, dir_of_1).is_err(), "a member without cluster admits nobody");
        store.update(|r| *r = record()).unwrap();
        store.admit(Some(&peer), 2, dir_of_1).unwrap();
        let cases: [(&str, v1::Identity, u64, u8); 7] = [
            ("node 3", peer.clone(), 3, 8),
            ("cluster", v1::Identity { cluster_uuid: Bytes::copy_from_slice(&[2; 16]), ..peer.clone() }, 2, 8),
            ("no cluster", v1::Identity { cluster_uuid: Bytes::new(), ..peer.clone() }, 2, 8),
            ("history", v1::Identity { history: 98, ..peer.clone() }, 2, 8),
            ("protocol", v1::Identity { protocol_version: PROTOCOL_VERSION + 2, ..peer.clone() }, 2, 8),
            ("data directory", peer.clone(), 2, 9),
            ("node 2", v1::Identity { node_id: 2, ..peer.clone() }, 2, 7),
        ];
        for (names, identity, target, dir) in cases {
            let error = store.admit(Some(&identity), target, &[dir; 16]).unwrap_err();
            assert_eq!(error.code(), ErrorCode::WrongCluster);
            assert!(error.message().contains(names), "{error} does not name {names}");
        }
        assert!(store.admit(None, 2, dir_of_1).is_err());
        store.admit(Some(&v1::Identity { protocol_version: PROTOCOL_VERSION + 1, ..peer }), 2, dir_of_1).unwrap();
    }
}
