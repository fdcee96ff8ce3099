//! What is on disks and on the wire already: frames of every kind as each version of the encoding writes them, checked in. A binary
//! reads those of every version up to its own, and writes those of its own byte for byte.

use std::fmt::Write as _;
use std::path::PathBuf;

use super::*;
use crate::retired::Retired;

/// A kind of frame, its bytes, and how they are read and written again.
type Sample = (&'static str, Bytes, fn(Bytes) -> Bytes);

fn again<M: Message>(frame: Bytes) -> Bytes {
    encode(&decode::<M>(frame).expect("a frame of the corpus is read"))
}

fn sample<M: Message>(name: &'static str, message: &M) -> Sample {
    (name, encode(message), again::<M>)
}

fn samples() -> Vec<Sample> {
    let (id, later) = (log_id(7, 300), log_id(1 << 40, u64::MAX));
    let (vote, leads) = (Vote::new(8, 2), Vote::new_committed(9, 3));
    let member = |address: &str, retired| Member { address: address.to_owned(), retired };
    let nodes = BTreeMap::from([
        (1, member("10.0.0.1:50051", Retired::default())),
        (2, member("[fd00::2]:50051", Retired::from_parts(4, BTreeSet::from([6, 9])))),
        (300, member("h3.example:1", Retired::default())),
    ]);
    let membership = Membership::new(vec![BTreeSet::from([1, 2]), BTreeSet::from([1, 300])], nodes).unwrap();
    let entry = |payload| Entry { log_id: id, payload };
    let payload = EntryPayload::Normal(Payload(Bytes::from_static(b"ops")));
    let (blank, normal, change) =
        (entry(EntryPayload::Blank), entry(payload), entry(EntryPayload::Membership(membership.clone())));
    let append = AppendEntriesRequest::<C> {
        vote: leads,
        prev_log_id: Some(id),
        entries: vec![blank.clone(), normal.clone(), change.clone()],
        leader_commit: None,
    };
    let mut asks = VoteRequest::<C>::new(vote, Some(later));
    asks.leadership_transfer = true;
    let stream: [StreamAppendResult<C>; 3] =
        [Ok(Some(id)), Err(StreamAppendError::Conflict(id)), Err(StreamAppendError::HigherVote(leads))];
    let transfer: [TransferLeaderResponse<C>; 3] = [
        Ok(()),
        Err(TransferLeaderError::VoteChanged { expected: vote, actual: leads }),
        Err(TransferLeaderError::LogNotFlushed { expected: Some(id), actual: None }),
    ];
    let stored = StoredMembership::new(Some(id), membership.clone());
    vec![
        sample("log_id", &id),
        sample("log_id_long", &later),
        sample("vote", &vote),
        sample("vote_committed", &leads),
        sample("membership", &membership),
        sample("entry_blank", &blank),
        sample("entry_normal", &normal),
        sample("entry_membership", &change),
        sample("snapshot_meta", &SnapshotMeta { last_log_id: Some(later), last_membership: stored }),
        sample("snapshot_meta_empty", &SnapshotMeta::default()),
        sample("append_request", &append),
        sample("append_success", &AppendEntriesResponse::<C>::Success),
        sample("append_partial", &AppendEntriesResponse::<C>::PartialSuccess(Some(id))),
        sample("append_conflict", &AppendEntriesResponse::<C>::Conflict),
        sample("append_higher_vote", &AppendEntriesResponse::<C>::HigherVote(vote)),
        sample("stream_ok", &stream[0]),
        sample("stream_conflict", &stream[1]),
        sample("stream_higher_vote", &stream[2]),
        sample("vote_request", &asks),
        sample("vote_response", &VoteResponse::<C> { vote, vote_granted: true, last_log_id: Some(id) }),
        sample("transfer_request", &TransferLeaderRequest::<C>::new(vote, 2, Some(id))),
        sample("transfer_done", &transfer[0]),
        sample("transfer_vote_changed", &transfer[1]),
        sample("transfer_not_flushed", &transfer[2]),
        sample("snapshot_response", &SnapshotResponse::<C>::new(leads)),
    ]
}

fn file_of(version: u8) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("src/codec/corpus/version-{version}.txt"))
}

/// Lines `name hex`.
fn read(version: u8) -> BTreeMap<String, Bytes> {
    let text = std::fs::read_to_string(file_of(version)).expect("each version has a corpus");
    let frame = |line: &str| {
        let (name, hex) = line.split_once(' ').expect("name and bytes");
        let bytes = (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex"));
        (name.to_owned(), bytes.collect::<Vec<u8>>().into())
    };
    text.lines().map(frame).collect()
}

#[test]
fn frames_of_every_version_are_read_and_those_of_this_one_written() {
    for version in 1..=CODEC_VERSION {
        let stored = read(version);
        for (name, frame, again) in samples() {
            let then = stored.get(name).unwrap_or_else(|| panic!("version {version} has no {name}"));
            if version == CODEC_VERSION {
                assert_eq!(*then, frame, "{name} is written otherwise: that takes a new version of the encoding");
            }
            assert_eq!(again(then.clone()), frame, "{name} of version {version}");
        }
        assert_eq!(stored.len(), samples().len(), "version {version} holds a frame that nobody reads any more");
    }
}

#[test]
#[ignore = "writes the corpus of this binary's version of the encoding, once"]
fn write_the_corpus_of_this_version() {
    let path = file_of(CODEC_VERSION);
    assert!(!path.exists(), "{} exists: what a version wrote does not change", path.display());
    let mut text = String::new();
    for (name, frame, _) in samples() {
        let hex: String = frame.iter().map(|byte| format!("{byte:02x}")).collect();
        writeln!(text, "{name} {hex}").unwrap();
    }
    std::fs::write(path, text).unwrap();
}
