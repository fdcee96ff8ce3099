//! Looks: whether a key is there, what is listed, and the bytes, verified.

use std::time::Duration;

use tidepool_proto::clock::{BootInstant, holder_share};
use tidepool_proto::v1::client_request::Body as Ask;
use tidepool_proto::v1::client_response::Body as Answer;
use tidepool_proto::{Error, ErrorCode, History as HistoryId, ObjectId, object, v1};
use tidepool_raft::rt;
use tidepool_transport::ReadAccess;

use super::{ATTEMPT, CALL, CHUNK, Client, TRANSFER};
use crate::history::{Event, Value, now};
use crate::keys::{content, group, key_name, tenant};

/// How slow a slow reader is.
const SLOW_MS: u64 = 600;
/// The same where leases may end before their time: as long as one may be.
const SLOWER_MS: u64 = 1_500;

impl Client {
    /// Looks whether a key is there.
    pub async fn exist(&mut self, key: u64) -> Option<bool> {
        let (invoked, deadline) = (now(), BootInstant::now().after(CALL));
        self.about(key);
        let mode = if self.random.chance(50) { v1::LeaseMode::Grant } else { v1::LeaseMode::NoTouch };
        let request = v1::ExistRequest {
            keys: Some(v1::Keys::pack([key_name(key)])),
            lease_mode: mode as i32,
            lease_ttl_ms: 0,
            suspect_nodes: Vec::new(),
        };
        let Ok(Answer::Exist(answer)) = self.ask(Ask::Exist(request), deadline).await else { return None };
        let is_there = answer.present.first() == Some(&1);
        // A member of a group is there only while all of the group is: that it is not says nothing of this key alone.
        if is_there || group(self.keys, key).is_empty() {
            let event = if is_there { Event::Exists } else { Event::Missed };
            self.history.log(self.machine.id, key, invoked, true, event);
        }
        Some(is_there)
    }

    /// Lists the keys of the default tenant: each is there with this object, or is not.
    pub async fn list(&mut self, keys: u64) {
        let (invoked, deadline) = (now(), BootInstant::now().after(CALL));
        self.tenant = "";
        let request = v1::ListRequest { prefix: b"key-".to_vec().into(), ..Default::default() };
        let Ok(Answer::List(answer)) = self.ask(Ask::List(request), deadline).await else { return };
        if answer.more {
            return;
        }
        for key in (0..keys).filter(|key| tenant(self.keys, *key).is_empty()) {
            let listed = answer.objects.iter().find(|object| object.key[..] == key_name(key)[..]);
            let of = |object: &v1::ListedObject| Event::Listed(object.object_id);
            let event = listed.map_or(Event::Missed, of);
            self.history.log_beside(self.machine.id, key, invoked, event);
        }
    }

    /// Gets a value and verifies it. None: nobody could say.
    pub async fn get(&mut self, key: u64) -> Option<bool> {
        let (invoked, deadline, asked) = (now(), BootInstant::now().after(CALL), BootInstant::now());
        self.about(key);
        let request = v1::LocateRequest {
            keys: Some(v1::Keys::pack([key_name(key)])),
            lease_mode: v1::LeaseMode::Grant as i32,
            lease_ttl_ms: 0,
            suspect_nodes: Vec::new(),
        };
        let answer = self.ask(Ask::Locate(request), deadline).await;
        let Ok(Answer::Locate(mut answer)) = answer else { return None };
        let found = answer.objects.remove(0);
        match ErrorCode::from_u32(found.code) {
            ErrorCode::Ok => {}
            ErrorCode::ObjectNotFound => {
                self.history.log(self.machine.id, key, invoked, true, Event::Missed);
                return Some(false);
            }
            ErrorCode::Internal => {
                self.history.wrong(format!("a lookup of key {key} answered INTERNAL"));
                return None;
            }
            _ => return None,
        }
        let lease = holder_share(Duration::from_millis(u64::from(found.lease_ttl_ms)));
        let mut reports = Vec::new();
        // A slow reader: its lease is what it has.
        if self.random.below(1_000) < 3 * self.stalls {
            let longest = if self.clocks_agree && !self.leases_may_break { SLOW_MS } else { SLOWER_MS };
            rt::sleep(Duration::from_millis(self.random.range(20, longest))).await;
        }
        for replica in &found.replicas {
            let address = answer.nodes.iter().find(|node| node.node_id == replica.node_id).map(|n| n.address.clone());
            let Some(address) = address else { continue };
            let read = self.read(&found, replica, &address).await;
            let is_leased = found.lease_ttl_ms > 0 && asked.elapsed() <= lease;
            let (kind, why) = match read {
                Ok(bytes) => {
                    if found.lease_ttl_ms > 0 && !is_leased {
                        // Bytes that came after the lease are thrown away: neither a hit nor a miss.
                        return None;
                    }
                    match self.verify(key, &found, &bytes) {
                        Ok(()) => {
                            self.history.log(self.machine.id, key, invoked, true, Event::Got(self.value_of(&found)));
                            return Some(true);
                        }
                        // What a restored directory lists is looked for first, and is a miss until then (I2).
                        Err(_) if is_leased && found.history != 0 => (v1::read_report::Kind::Corrupt, None),
                        Err(error) if is_leased => (v1::read_report::Kind::Corrupt, Some(error)),
                        Err(_) => continue,
                    }
                }
                Err(Some(error)) if is_leased && error.code() == ErrorCode::Internal => {
                    self.history.wrong(format!("a datanode answered {error}"));
                    continue;
                }
                // What a lease allows is refused: log time runs away from the time of those that hold it (T1, W2).
                Err(Some(error)) if is_leased && error.code() == ErrorCode::CapabilityRefused => {
                    if !self.may_not_hold(invoked) {
                        self.history.wrong(format!("client {} holds a lease and is refused: {error}", self.machine.id));
                    }
                    continue;
                }
                Err(_) if is_leased => (v1::read_report::Kind::Unreachable, None),
                Err(_) => continue,
            };
            if let Some(error) = why
                && !self.may_not_hold(invoked)
                && !self.bits_flip
            {
                let (object, replica) = (ObjectId(found.object_id), replica.replica_id);
                self.history.wrong(format!(
                    "RIGHT-BYTES: client {} read key {key} object {object} replica {replica} under a lease: {error}",
                    self.machine.id
                ));
            }
            reports.push(v1::ReadReport {
                kind: kind as i32,
                object_id: found.object_id,
                replica_id: replica.replica_id,
                node_id: replica.node_id,
                key: key_name(key).into(),
            });
        }
        if !reports.is_empty() {
            let report = Ask::ReadReport(v1::ReadReportRequest { reports });
            drop(self.ask(report, BootInstant::now().after(ATTEMPT)).await);
        }
        None
    }

    /// A lease that was asked for at `invoked` and seems to hold does not. Whether that may be: it is a miss then, and counted.
    fn may_not_hold(&self, invoked: u64) -> bool {
        if !self.clocks_agree {
            self.history.outlived();
            return true;
        }
        self.leases_may_break && self.history.may_be_broken(invoked)
    }

    fn value_of(&self, found: &v1::ObjectLocation) -> Value {
        let history = if found.history == 0 { self.history_number() } else { found.history };
        self.history.value(history, found.object_id)
    }

    async fn read(
        &self,
        found: &v1::ObjectLocation,
        replica: &v1::Replica,
        address: &str,
    ) -> Result<Vec<u8>, Option<Error>> {
        let mut bytes = Vec::with_capacity(replica.length as usize);
        while (bytes.len() as u64) < replica.length {
            let offset = bytes.len() as u64;
            let access = ReadAccess {
                object_id: found.object_id,
                replica: replica.clone(),
                offset,
                length: (replica.length - offset).min(CHUNK as u64 * 2),
            };
            let work = self.net.at(self.machine.id, address, move |node| async move { node.read(&access) });
            let part = rt::timeout(TRANSFER, work).await.map_err(|_| None)?.ok_or(None)?;
            bytes.extend_from_slice(&part.map_err(Some)?);
        }
        Ok(bytes)
    }

    /// Everything that a reader must check.
    fn verify(&self, key: u64, found: &v1::ObjectLocation, stored: &[u8]) -> Result<(), Error> {
        let history = if found.history == 0 { self.history_number() } else { found.history };
        let prefix_bytes = object::prefix_bytes(found.length) as usize;
        let short = || Error::new(ErrorCode::ChecksumMismatch, "it is shorter than its table");
        let prefix = stored.get(..prefix_bytes).ok_or_else(short)?;
        let header = object::verify_prefix(prefix)?;
        let hash = object::key_hash(self.tenant, &key_name(key));
        header.expect(HistoryId(history), ObjectId(found.object_id), &hash, found.length)?;
        let payload = &stored[prefix_bytes..(prefix_bytes + found.length as usize).min(stored.len())];
        object::verify_parts(prefix, &[payload])?;
        // All checks passed: these must be the bytes that were put.
        if payload != content(self.value_of(found), found.length) {
            self.history.wrong(format!(
                "RIGHT-BYTES: key {key} object {} verified and holds other bytes than were put",
                ObjectId(found.object_id)
            ));
        }
        Ok(())
    }
}
