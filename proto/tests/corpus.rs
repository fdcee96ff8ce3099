//! The checked-in corpus of RPC frames: what binaries of each feature level send, which every later one must understand
//! alike (M6).
//!
//! `tests/corpus/level-N.txt` has three lines a frame: message and case, the bytes in hex, what they were decoded to. Made once a
//! level, with the release that brings it, from the .proto files as they are then, with every field set; never again:
//! `cargo nextest run --release -p tidepool-proto --run-ignored only write_the_corpus_of_this_level`.

mod schema;

use bytes::Bytes;
use prost::Message;
use std::fmt::Write as _;
use std::path::PathBuf;
use tidepool_proto::v1;

/// The level whose corpus the generator writes: the highest there is.
const LEVEL: u32 = 2;

/// Decodes a frame and says what it is, and its bytes written again.
macro_rules! decoders {
    ($($message:ident)*) => {
        /// Messages that the corpus can hold.
        const MESSAGES: &[&str] = &[$(stringify!($message)),*];

        fn decode(name: &str, frame: Bytes) -> (String, Vec<u8>) {
            match name {
                $(stringify!($message) => {
                    let message = v1::$message::decode(frame).unwrap_or_else(|error| panic!("{name}: {error}"));
                    (format!("{message:?}"), message.encode_to_vec())
                })*
                _ => panic!("{name} is in the corpus and not here"),
            }
        }
    };
}

decoders! {
    FeatureLevelRequest FeatureLevelResponse MemberLevel ChangeMembersRequest ChangeMembersResponse ShareRecencyRequest RecencyHint ShareRecencyResponse SetTenantRequest
    SetTenantResponse DropTenantRequest DropTenantResponse ListTenantsRequest ListTenantsResponse TenantStatus
    CreateTaskRequest CreateTaskResponse ListTasksRequest ListTasksResponse TaskStatus CancelTaskRequest
    CancelTaskResponse ListHotObjectsRequest ListHotObjectsResponse HotObject StatusRequest StatusResponse MemberStatus
    NodeStatus SegmentStatus TransferRequest TransferResponse SetLogLevelRequest SetLogLevelResponse CompactRequest
    CompactResponse StateDigestRequest StateDigestResponse ClientRequest ClientResponse MembersChanged HelloRequest
    HelloResponse Member ExistRequest ExistResponse LocateRequest LocateResponse ObjectLocation PutStartRequest
    PutStartItem PutStartResponse PutGrant PutEndRequest PutEndItem PutEndResponse PutEndResult PutRevokeRequest
    PutRevokeResponse RemoveRequest RemoveResponse ReleaseLeaseRequest ReleaseLeaseResponse ListRequest ListResponse
    ListedObject StatRequest StatResponse ObjectStat ReplicaStat ReadReportRequest ReadReport ReadReportResponse
    RemoveMatchingRequest RemoveMatchingResponse PinRequest PinResponse ReplicaClearRequest ReplicaClearResponse
    DataHello DataWelcome RegisterRequest RegisterResponse MountRequest MountSegment MountResponse MountedSegment
    UnmountRequest UnmountResponse HeartbeatRequest CopyReport Verdict HeartbeatResponse CopyOrder VerifyReplica
    DescribeRequest DescribeResponse SegmentDescription HandshakeRequest HandshakeResponse PrepareRequest RaftMember
    PrepareResponse AppendRequest AppendResponse ConsensusMessage SnapshotChunk Identity Keys ItemError CallError
    LeaderHint Replica NodeAddress ReplicaStatus Ancestor SnapshotStatus TakeSnapshotRequest TakeSnapshotResponse
    PresenceQuery PresenceAnswer
}

fn file_of(level: u32) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/corpus/level-{level}.txt"))
}

/// Names and values of a debug text, without what holds them together.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split([' ', ',', '{', '}', '[', ']', '(', ')']).filter(|word| !word.is_empty())
}

/// Whether `now` says everything that `then` said, in that order; fields that were added since are between.
fn still_says(then: &str, now: &str) -> bool {
    let mut now = words(now);
    words(then).all(|word| now.any(|other| other == word))
}

fn unhex(text: &str) -> Vec<u8> {
    let digits = text.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).unwrap());
    digits.map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect()
}

fn replay_level(level: u32) {
    let path = file_of(level);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let lines: Vec<&str> = text.lines().collect();
    for frame in lines.chunks(3) {
        let [name, hex, then] = frame else { panic!("{} is cut short", path.display()) };
        let message = name.split(' ').next().unwrap();
        let bytes = unhex(hex);
        let (now, again) = decode(message, bytes.clone().into());
        assert!(still_says(then, &now), "level {level}: {name} reads\n{now}\nit was\n{then}");
        assert_eq!(again, bytes, "level {level}: {name} is written otherwise");
    }
    assert!(lines.len() / 3 > 100, "{} frames", lines.len() / 3);
}

/// No field is renumbered, gets another type, or goes. The present level is written down with its release.
#[test]
fn frames_of_every_released_level_read_as_they_did() {
    for level in 1..=LEVEL {
        if level < LEVEL || file_of(level).exists() {
            replay_level(level);
        }
    }
}

/// The comparison itself: it lets fields come, and nothing else.
#[test]
fn a_field_that_goes_or_changes_is_noticed() {
    let then = "Member { node_id: 1, address: \"a\" }";
    assert!(still_says(then, "Member { node_id: 1, port: 7, address: \"a\", level: 2 }"));
    assert!(!still_says(then, "Member { node_id: 1 }"));
    assert!(!still_says(then, "Member { node_id: 2, address: \"a\" }"));
    assert!(!still_says(then, "Member { id: 1, address: \"a\" }"));
}

#[test]
#[ignore = "writes the corpus of this binary's feature level, once"]
fn write_the_corpus_of_this_level() {
    let path = file_of(LEVEL);
    assert!(!path.exists(), "{} exists: what a level sent does not change", path.display());
    let schema = schema::Schema::read();
    let mut text = String::new();
    for message in schema.messages() {
        assert!(MESSAGES.contains(&message), "{message} has no decoder here");
        for case in 0..schema.cases(message) {
            let bytes = schema.encode(message, case);
            let (debug, again) = decode(message, bytes.clone().into());
            assert_eq!(again, bytes, "{message}: {debug}");
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            writeln!(text, "{message} {case}\n{hex}\n{debug}").unwrap();
        }
    }
    std::fs::write(path, text).unwrap();
}
