//! The messages: what each kind of frame holds.

use std::collections::{BTreeMap, BTreeSet};

use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, StreamAppendError, TransferLeaderError,
    TransferLeaderRequest, VoteRequest, VoteResponse,
};

use super::reader::{put_bytes, put_integer, put_option};
use super::{ADDRESS_BYTES_MAX, CodecError, JOINT_CONFIGS_MAX, MEMBERS_MAX, Message, REQUEST_ENTRIES_MAX, Reader};
use crate::retired::{RETIRED_IDS_MAX, Retired};
use crate::types::{
    Config, Entry, EntryPayload, LeaderId, LogId, Member, Membership, PAYLOAD_BYTES_MAX, Payload, SnapshotMeta,
    StoredMembership, Vote, log_id, retired_of, term_of,
};

/// Stands where the number of voter sets would, above its limit: a membership that names who left follows, and then
/// those. A program that does not know it refuses the entry instead of forgetting them.
const WITH_RETIRED: u64 = 255;

/// Room an entry takes beside its payload, at most, unless it is a membership.
const ENTRY_HEADER_BYTES: usize = 26;
/// Most that [`entry_size`] says of an entry that can be read again.
pub(crate) const ENTRY_BYTES_MAX: usize = ENTRY_HEADER_BYTES + PAYLOAD_BYTES_MAX;

impl Message for LogId {
    const KIND: u8 = 1;
    fn put(&self, out: &mut Vec<u8>) {
        put_integer(out, term_of(self));
        put_integer(out, self.index);
    }
    fn take(input: &mut Reader) -> Result<Self, CodecError> {
        let term = input.integer("term")?;
        Ok(log_id(term, input.integer("log index")?))
    }
}

fn put_log_id(out: &mut Vec<u8>, id: &Option<LogId>) {
    put_option(out, id.as_ref(), |out, id| id.put(out));
}

fn take_log_id(input: &mut Reader, what: &'static str) -> Result<Option<LogId>, CodecError> {
    input.option(what, LogId::take)
}

impl Message for Vote {
    const KIND: u8 = 2;
    fn put(&self, out: &mut Vec<u8>) {
        put_integer(out, self.leader_id.term);
        put_integer(out, self.leader_id.voted_for);
        out.push(u8::from(self.committed));
    }
    fn take(input: &mut Reader) -> Result<Self, CodecError> {
        let leader_id = LeaderId { term: input.integer("term")?, voted_for: input.integer("candidate")? };
        Ok(Vote { leader_id, committed: input.flag("vote is committed")? })
    }
}

impl Message for Membership {
    const KIND: u8 = 3;
    fn put(&self, out: &mut Vec<u8>) {
        let retired = retired_of(self);
        if !retired.is_empty() {
            put_integer(out, WITH_RETIRED);
        }
        let configs = self.get_joint_config();
        put_integer(out, configs.len() as u64);
        for voters in configs {
            put_integer(out, voters.len() as u64);
            for id in voters {
                put_integer(out, *id);
            }
        }
        put_integer(out, self.nodes().count() as u64);
        for (id, member) in self.nodes() {
            put_integer(out, *id);
            put_bytes(out, member.address.as_bytes());
        }
        if !retired.is_empty() {
            let (upto, ids) = retired.parts();
            put_integer(out, upto);
            put_integer(out, ids.len() as u64);
            ids.iter().for_each(|id| put_integer(out, *id));
        }
    }
    fn take(input: &mut Reader) -> Result<Self, CodecError> {
        let mut configs = Vec::new();
        let mut sets = input.integer("voter sets")?;
        let names_retired = sets == WITH_RETIRED;
        if names_retired {
            sets = input.integer("voter sets")?;
        }
        if sets > JOINT_CONFIGS_MAX as u64 {
            return Err(CodecError::TooLong { what: "voter sets", len: sets, max: JOINT_CONFIGS_MAX });
        }
        for _ in 0..sets {
            let mut voters = BTreeSet::new();
            for _ in 0..input.length("voters", MEMBERS_MAX)? {
                if !voters.insert(input.integer("voter")?) {
                    return Err(CodecError::Invalid { what: "voter" });
                }
            }
            configs.push(voters);
        }
        let mut nodes = BTreeMap::new();
        for _ in 0..input.length("members", MEMBERS_MAX)? {
            let id = input.integer("member")?;
            let address = input.text("member address", ADDRESS_BYTES_MAX)?;
            if nodes.insert(id, Member { address, retired: Retired::default() }).is_some() {
                return Err(CodecError::Invalid { what: "member" });
            }
        }
        if names_retired {
            let retired = take_retired(input)?;
            if nodes.is_empty() {
                return Err(CodecError::Invalid { what: "retired members" });
            }
            nodes.values_mut().for_each(|member| member.retired = retired.clone());
        }
        if configs.is_empty() && nodes.is_empty() {
            return Ok(Membership::default());
        }
        // Checks that no voter set is empty and every voter has an address.
        Membership::new(configs, nodes).map_err(|_| CodecError::Invalid { what: "membership" })
    }
}

fn take_retired(input: &mut Reader) -> Result<Retired, CodecError> {
    let upto = input.integer("retired members")?;
    let mut ids = BTreeSet::new();
    for _ in 0..input.length("retired members", RETIRED_IDS_MAX)? {
        let id = input.integer("retired member")?;
        if id <= upto || ids.last().is_some_and(|last| *last >= id) {
            return Err(CodecError::Invalid { what: "retired member" });
        }
        ids.insert(id);
    }
    if upto == 0 && ids.is_empty() {
        return Err(CodecError::Invalid { what: "retired members" });
    }
    Ok(Retired::from_parts(upto, ids))
}

impl Message for Entry {
    const KIND: u8 = 4;
    fn size_hint(&self) -> usize {
        entry_size(self)
    }
    fn put(&self, out: &mut Vec<u8>) {
        self.log_id.put(out);
        match &self.payload {
            EntryPayload::Blank => out.push(0),
            EntryPayload::Normal(payload) => {
                out.push(1);
                put_bytes(out, &payload.0);
            }
            EntryPayload::Membership(membership) => {
                out.push(2);
                membership.put(out);
            }
        }
    }
    fn take(input: &mut Reader) -> Result<Self, CodecError> {
        let log_id = LogId::take(input)?;
        let payload = match input.byte("entry kind")? {
            0 => EntryPayload::Blank,
            1 => EntryPayload::Normal(Payload(input.bytes("entry payload", PAYLOAD_BYTES_MAX)?)),
            2 => EntryPayload::Membership(Membership::take(input)?),
            _ => return Err(CodecError::Invalid { what: "entry kind" }),
        };
        Ok(Entry { log_id, payload })
    }
}

/// Bytes an entry takes in memory and, about, encoded.
pub(crate) fn entry_size(entry: &Entry) -> usize {
    ENTRY_HEADER_BYTES
        + match &entry.payload {
            EntryPayload::Blank => 0,
            EntryPayload::Normal(payload) => payload.0.len(),
            EntryPayload::Membership(membership) => {
                membership.nodes().map(|(_, member)| 16 + member.address.len()).sum()
            }
        }
}

impl<C: Config> Message for AppendEntriesRequest<C> {
    const KIND: u8 = 5;
    fn size_hint(&self) -> usize {
        128 + self.entries.iter().map(entry_size).sum::<usize>()
    }
    fn put(&self, out: &mut Vec<u8>) {
        self.vote.put(out);
        put_log_id(out, &self.prev_log_id);
        put_log_id(out, &self.leader_commit);
        put_integer(out, self.entries.len() as u64);
        for entry in &self.entries {
            entry.put(out);
        }
    }
    fn take(input: &mut Reader) -> Result<Self, CodecError> {
        let vote = Vote::take(input)?;
        let prev_log_id = take_log_id(input, "previous log id")?;
        let leader_commit = take_log_id(input, "leader's commit")?;
        let count = input.length("entries", REQUEST_ENTRIES_MAX)?;
        // An entry takes three bytes at least: a forged count buys no more memory than the frame brought.
        let mut entries = Vec::with_capacity(count.min(input.remaining() / 3));
        for _ in 0..count {
            entries.push(Entry::take(input)?);
        }
        Ok(AppendEntriesRequest { vote, prev_log_id, entries, leader_commit })
    }
}

impl<C: Config> Message for AppendEntriesResponse<C> {
    const KIND: u8 = 6;
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            AppendEntriesResponse::Success => out.push(0),
            AppendEntriesResponse::PartialSuccess(id) => {
                out.push(1);
                put_log_id(out, id);
            }
            AppendEntriesResponse::Conflict => out.push(2),
            AppendEntriesResponse::HigherVote(vote) => {
                out.push(3);
                vote.put(out);
            }
        }
    }
    fn take(input: &mut Reader) -> Result<Self, CodecError> {
        Ok(match input.byte("append response")? {
            0 => AppendEntriesResponse::Success,
            1 => AppendEntriesResponse::PartialSuccess(take_log_id(input, "last matching log id")?),
            2 => AppendEntriesResponse::Conflict,
            3 => AppendEntriesResponse::HigherVote(Vote::take(input)?),
            _ => return Err(CodecError::Invalid { what: "append response" }),
        })
    }
}

/// One answer on a pipelined append stream.
impl<C: Config> Message for Result<Option<LogId>, StreamAppendError<C>> {
    const KIND: u8 = 7;
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Ok(id) => {
                out.push(0);
                put_log_id(out, id);
            }
            Err(StreamAppendError::Conflict(id)) => {
                out.push(1);
                id.put(out);
            }
            Err(StreamAppendError::HigherVote(vote)) => {
                out.push(2);
                vote.put(out);
            }
        }
    }
    fn take(input: &mut Reader) -> Result<Self, CodecError> {
        Ok(match input.byte("append answer")? {
            0 => Ok(take_log_id(input, "last matching log id")?),
            1 => Err(StreamAppendError::Conflict(LogId::take(input)?)),
            2 => Err(StreamAppendError::HigherVote(Vote::take(input)?)),
            _ => return Err(CodecError::Invalid { what: "append answer" }),
        })
    }
}

impl<C: Config> Message for VoteRequest<C> {
    const KIND: u8 = 8;
    fn put(&self, out: &mut Vec<u8>) {
        self.vote.put(out);
        put_log_id(out, &self.last_log_id);
        out.push(u8::from(self.leadership_transfer));
    }
    fn take(input: &mut Reader) -> Result<Self, CodecError> {
        let vote = Vote::take(input)?;
        let mut request = VoteRequest::new(vote, take_log_id(input, "last log id")?);
        request.leadership_transfer = input.flag("leadership transfer")?;
        Ok(request)
    }
}

impl<C: Config> Message for VoteResponse<C> {
    const KIND: u8 = 9;
    fn put(&self, out: &mut Vec<u8>) {
        self.vote.put(out);
        put_log_id(out, &self.last_log_id);
        out.push(u8::from(self.vote_granted));
    }
    fn take(input: &mut Reader) -> Result<Self, CodecError> {
        let vote = Vote::take(input)?;
        let last_log_id = take_log_id(input, "last log id")?;
        Ok(VoteResponse { vote, last_log_id, vote_granted: input.flag("vote granted")? })
    }
}

impl<C: Config> Message for TransferLeaderRequest<C> {
    const KIND: u8 = 10;
    fn put(&self, out: &mut Vec<u8>) {
        self.from_leader().put(out);
        put_integer(out, *self.to_node_id());
        put_log_id(out, &self.last_log_id().cloned());
    }
    fn take(input: &mut Reader) -> Result<Self, CodecError> {
        let from = Vote::take(input)?;
        let to = input.integer("new leader")?;
        Ok(TransferLeaderRequest::new(from, to, take_log_id(input, "last log id")?))
    }
}

impl<C: Config> Message for Result<(), TransferLeaderError<C>> {
    const KIND: u8 = 11;
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Ok(()) => out.push(0),
            Err(TransferLeaderError::VoteChanged { expected, actual }) => {
                out.push(1);
                expected.put(out);
                actual.put(out);
            }
            Err(TransferLeaderError::LogNotFlushed { expected, actual }) => {
                out.push(2);
                put_log_id(out, expected);
                put_log_id(out, actual);
            }
        }
    }
    fn take(input: &mut Reader) -> Result<Self, CodecError> {
        Ok(match input.byte("transfer response")? {
            0 => Ok(()),
            1 => {
                let expected = Vote::take(input)?;
                Err(TransferLeaderError::VoteChanged { expected, actual: Vote::take(input)? })
            }
            2 => {
                let expected = take_log_id(input, "expected log id")?;
                Err(TransferLeaderError::LogNotFlushed { expected, actual: take_log_id(input, "actual log id")? })
            }
            _ => return Err(CodecError::Invalid { what: "transfer response" }),
        })
    }
}

impl Message for SnapshotMeta {
    const KIND: u8 = 12;
    fn size_hint(&self) -> usize {
        64 + self.last_membership.nodes().map(|(_, member)| 16 + member.address.len()).sum::<usize>()
    }
    fn put(&self, out: &mut Vec<u8>) {
        put_log_id(out, &self.last_log_id);
        put_log_id(out, self.last_membership.log_id());
        self.last_membership.membership().put(out);
    }
    fn take(input: &mut Reader) -> Result<Self, CodecError> {
        let last_log_id = take_log_id(input, "snapshot's last log id")?;
        let membership_log_id = take_log_id(input, "membership's log id")?;
        let last_membership = StoredMembership::new(membership_log_id, Membership::take(input)?);
        Ok(SnapshotMeta { last_log_id, last_membership })
    }
}

impl<C: Config> Message for SnapshotResponse<C> {
    const KIND: u8 = 13;
    fn put(&self, out: &mut Vec<u8>) {
        self.vote.put(out);
    }
    fn take(input: &mut Reader) -> Result<Self, CodecError> {
        Ok(SnapshotResponse::new(Vote::take(input)?))
    }
}
