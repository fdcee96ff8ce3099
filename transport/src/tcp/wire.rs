//! Frames of the tcp data plane. Everything is little endian and of a fixed size, or its size is in a fixed part that
//! is checked before anything is allocated.
//!
//! ```text
//! request   magic "TPq1" | kind u8 | 0 u8 | record_bytes u16 | items u32 | remaining_ms u32 | id u64 | payload_bytes u64
//!           items x record (access), then for a write the payloads, one behind the other
//! answer    magic "TPr1" | kind u8 | 0 x3 | items u32 | body_bytes u32 | id u64 | payload_bytes u64
//!           body: one status an item, or nothing if all items of a read succeeded; then for a read the payloads
//! ```
//! A record may grow: a reader takes the fields it knows and skips the rest of `record_bytes`.

use bytes::{Buf, BufMut, Bytes};
use tidepool_proto::{Error, ErrorCode, v1};

use super::options::{FRAME_ITEMS_MAX, ITEM_BYTES_MAX};
use crate::access::{ReadAccess, WriteAccess};
use crate::engine::WriteError;
use crate::memory::{Proof, WriteOutcome, WriteReply};

/// Bytes of a request's or an answer's fixed part.
pub const HEADER_BYTES: usize = 32;
/// Bytes of a record this version writes.
pub const RECORD_BYTES: usize = 104;
/// Largest record a reader takes.
pub const RECORD_BYTES_MAX: usize = 512;
/// Longest message of one item's error; longer ones are cut.
pub const MESSAGE_BYTES_MAX: usize = 512;
/// Largest body of an answer.
pub const BODY_BYTES_MAX: usize = FRAME_ITEMS_MAX * STATUS_BYTES_MAX;

const STATUS_BYTES_MAX: usize = 1 + 16 + 4 + 4 + 2 + MESSAGE_BYTES_MAX;
const REQUEST_MAGIC: u32 = u32::from_le_bytes(*b"TPq1");
const ANSWER_MAGIC: u32 = u32::from_le_bytes(*b"TPr1");
const MAC_BYTES: usize = 16;

/// What a frame is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    /// Reads.
    Read = 1,
    /// Writes.
    Write = 2,
    /// Answer only: the connection ends, the body says why.
    Refusal = 255,
}

/// Fixed part of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// Read or write.
    pub kind: Kind,
    /// Items.
    pub items: usize,
    /// Bytes of each record.
    pub record_bytes: usize,
    /// Time left when it was sent; 2^32-1 is the longest.
    pub remaining_ms: u32,
    /// Names the exchange within the connection.
    pub id: u64,
    /// Bytes of payload that follow the records (write), else 0.
    pub payload_bytes: u64,
}

/// Fixed part of an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Answer {
    /// As the request, or refusal.
    pub kind: Kind,
    /// As the request.
    pub items: usize,
    /// Bytes of statuses.
    pub body_bytes: usize,
    /// As the request.
    pub id: u64,
    /// Bytes of payload that follow the body (read), else 0.
    pub payload_bytes: u64,
}

/// A malformed frame: the connection cannot go on.
fn bad(what: impl Into<String>) -> Error {
    Error::new(ErrorCode::BadFrame, what)
}

impl Request {
    /// Appends the fixed part.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put_u32_le(REQUEST_MAGIC);
        out.put_u8(self.kind as u8);
        out.put_u8(0);
        out.put_u16_le(self.record_bytes as u16);
        out.put_u32_le(self.items as u32);
        out.put_u32_le(self.remaining_ms);
        out.put_u64_le(self.id);
        out.put_u64_le(self.payload_bytes);
    }

    /// Reads and checks the fixed part.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Request, Error> {
        let mut bytes = &bytes[..];
        let magic = bytes.get_u32_le();
        if magic != REQUEST_MAGIC {
            return Err(bad(format!("data frame starts with {magic:#010x}, not a request's magic")));
        }
        let kind = match bytes.get_u8() {
            1 => Kind::Read,
            2 => Kind::Write,
            kind => return Err(bad(format!("data frame of unknown kind {kind}"))),
        };
        bytes.advance(1);
        let record_bytes = bytes.get_u16_le() as usize;
        let items = bytes.get_u32_le() as usize;
        let (remaining_ms, id, payload_bytes) = (bytes.get_u32_le(), bytes.get_u64_le(), bytes.get_u64_le());
        if !(RECORD_BYTES..=RECORD_BYTES_MAX).contains(&record_bytes) {
            return Err(bad(format!(
                "data frame with records of {record_bytes} bytes; {RECORD_BYTES} to {RECORD_BYTES_MAX} are taken"
            )));
        }
        if !(1..=FRAME_ITEMS_MAX).contains(&items) {
            return Err(bad(format!("data frame of {items} items; 1 to {FRAME_ITEMS_MAX} are taken")));
        }
        if kind == Kind::Read && payload_bytes != 0 {
            return Err(bad(format!("read request with {payload_bytes} bytes of payload")));
        }
        Ok(Request { kind, items, record_bytes, remaining_ms, id, payload_bytes })
    }
}

impl Answer {
    /// Appends the fixed part.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put_u32_le(ANSWER_MAGIC);
        out.put_u8(self.kind as u8);
        out.put_bytes(0, 3);
        out.put_u32_le(self.items as u32);
        out.put_u32_le(self.body_bytes as u32);
        out.put_u64_le(self.id);
        out.put_u64_le(self.payload_bytes);
    }

    /// Reads and checks the fixed part.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Answer, Error> {
        let mut bytes = &bytes[..];
        let magic = bytes.get_u32_le();
        if magic != ANSWER_MAGIC {
            return Err(bad(format!("data frame starts with {magic:#010x}, not an answer's magic")));
        }
        let kind = match bytes.get_u8() {
            1 => Kind::Read,
            2 => Kind::Write,
            255 => Kind::Refusal,
            kind => return Err(bad(format!("data frame of unknown kind {kind}"))),
        };
        bytes.advance(3);
        let (items, body_bytes) = (bytes.get_u32_le() as usize, bytes.get_u32_le() as usize);
        let (id, payload_bytes) = (bytes.get_u64_le(), bytes.get_u64_le());
        if body_bytes > BODY_BYTES_MAX {
            return Err(bad(format!("answer with {body_bytes} bytes of statuses; {BODY_BYTES_MAX} are taken")));
        }
        Ok(Answer { kind, items, body_bytes, id, payload_bytes })
    }
}

fn put_record(out: &mut Vec<u8>, object_id: u64, replica: &v1::Replica, offset: u64, length: u64) {
    let mut mac = [0u8; MAC_BYTES];
    // A MAC of another length is no MAC: it is sent as none and refused by the datanode, not by us.
    let mac_bytes = if replica.mac.len() == MAC_BYTES { MAC_BYTES } else { 0 };
    mac[..mac_bytes].copy_from_slice(&replica.mac[..mac_bytes]);
    for word in [
        object_id,
        replica.replica_id,
        replica.segment_id,
        replica.incarnation,
        replica.node_id,
        replica.offset,
        replica.length,
        replica.expires_log_time_ms,
    ] {
        out.put_u64_le(word);
    }
    out.put_i32_le(replica.kind);
    out.put_u32_le(mac_bytes as u32);
    out.put_slice(&mac);
    out.put_u64_le(offset);
    out.put_u64_le(length);
}

/// Appends a read's record.
pub fn put_read(out: &mut Vec<u8>, access: &ReadAccess) {
    put_record(out, access.object_id, &access.replica, access.offset, access.length);
}

/// Appends a write's record.
pub fn put_write(out: &mut Vec<u8>, access: &WriteAccess) {
    put_record(out, access.object_id, &access.replica, 0, access.length);
}

/// Reads one record; the fields of a write are those of a read from 0. Its length is bounded here.
pub fn get_record(mut record: &[u8]) -> Result<ReadAccess, Error> {
    if record.len() < RECORD_BYTES {
        return Err(bad(format!("access record of {} bytes, not {RECORD_BYTES}", record.len())));
    }
    let mut word = || record.get_u64_le();
    let object_id = word();
    let mut replica = v1::Replica {
        replica_id: word(),
        segment_id: word(),
        incarnation: word(),
        node_id: word(),
        offset: word(),
        length: word(),
        expires_log_time_ms: word(),
        ..Default::default()
    };
    replica.kind = record.get_i32_le();
    let mac_bytes = (record.get_u32_le() as usize).min(MAC_BYTES);
    replica.mac = Bytes::copy_from_slice(&record[..mac_bytes]);
    record.advance(MAC_BYTES);
    let (offset, length) = (record.get_u64_le(), record.get_u64_le());
    if length > ITEM_BYTES_MAX {
        return Err(bad(format!("item of {length} bytes; {ITEM_BYTES_MAX} are taken")));
    }
    Ok(ReadAccess { object_id, replica, offset, length })
}

fn put_error(out: &mut Vec<u8>, error: &Error) {
    let mut end = error.message().len().min(MESSAGE_BYTES_MAX);
    while !error.message().is_char_boundary(end) {
        end -= 1;
    }
    out.put_u32_le(error.code() as u32);
    out.put_u32_le(error.retry_after_ms());
    out.put_u16_le(end as u16);
    out.put_slice(&error.message().as_bytes()[..end]);
}

fn get_error(body: &mut &[u8]) -> Result<Error, Error> {
    if body.len() < 10 {
        return Err(bad("answer's statuses end early"));
    }
    let (code, retry_after_ms, length) = (body.get_u32_le(), body.get_u32_le(), body.get_u16_le() as usize);
    if length > MESSAGE_BYTES_MAX || body.len() < length {
        return Err(bad(format!("error message of {length} bytes in {} bytes of answer", body.len())));
    }
    let message = String::from_utf8_lossy(&body[..length]).into_owned();
    body.advance(length);
    let code = match ErrorCode::from_u32(code) {
        ErrorCode::Ok => ErrorCode::Internal,
        code => code,
    };
    Ok(Error::new(code, message).retry_after(retry_after_ms))
}

/// Statuses of a read frame: empty when all succeeded.
pub fn put_read_statuses(out: &mut Vec<u8>, statuses: &[Result<(), Error>]) {
    if statuses.iter().all(Result::is_ok) {
        return;
    }
    for status in statuses {
        out.put_u8(status.is_ok() as u8);
        if let Err(error) = status {
            put_error(out, error);
        }
    }
}

/// Reads the statuses of a read frame.
pub fn get_read_statuses(mut body: &[u8], items: usize) -> Result<Vec<Result<(), Error>>, Error> {
    if body.is_empty() {
        return Ok(vec![Ok(()); items]);
    }
    let mut statuses = Vec::with_capacity(items);
    for _ in 0..items {
        if body.is_empty() {
            return Err(bad("answer's statuses end early"));
        }
        statuses.push(if body.get_u8() == 1 { Ok(()) } else { Err(get_error(&mut body)?) });
    }
    if !body.is_empty() {
        return Err(bad(format!("{} bytes behind an answer's statuses", body.len())));
    }
    Ok(statuses)
}

/// Status of a write: no statement (0), stored (1), aborted with (2) a proof.
pub fn put_write_status(out: &mut Vec<u8>, status: &Result<WriteReply, Error>) {
    let unknown = || Error::new(ErrorCode::TransferFailed, "the datanode aborted the put without a reason");
    match status {
        Ok(WriteReply { outcome: WriteOutcome::Stored, proof, .. }) => {
            out.put_u8(1);
            out.put_slice(proof);
        }
        Ok(WriteReply { outcome: WriteOutcome::Aborted, proof, error }) => {
            out.put_u8(2);
            out.put_slice(proof);
            put_error(out, error.as_ref().unwrap_or(&unknown()));
        }
        Err(error) => {
            out.put_u8(0);
            put_error(out, error);
        }
    }
}

/// Reads the statuses of a write frame.
pub fn get_write_statuses(mut body: &[u8], items: usize) -> Result<Vec<Result<WriteReply, WriteError>>, Error> {
    fn get_proof(body: &mut &[u8]) -> Result<Proof, Error> {
        if body.len() < 16 {
            return Err(bad("answer's statuses end early"));
        }
        let proof = body[..16].try_into().expect("16 bytes");
        body.advance(16);
        Ok(proof)
    }
    let mut statuses = Vec::with_capacity(items);
    for _ in 0..items {
        if body.is_empty() {
            return Err(bad("answer's statuses end early"));
        }
        statuses.push(match body.get_u8() {
            0 => Err(WriteError::unclean(get_error(&mut body)?)),
            1 => Ok(WriteReply { outcome: WriteOutcome::Stored, error: None, proof: get_proof(&mut body)? }),
            2 => {
                let proof = get_proof(&mut body)?;
                Err(WriteError { error: get_error(&mut body)?, aborted: Some(proof) })
            }
            tag => return Err(bad(format!("write status {tag}"))),
        });
    }
    if !body.is_empty() {
        return Err(bad(format!("{} bytes behind an answer's statuses", body.len())));
    }
    Ok(statuses)
}

/// A whole refusal frame.
pub fn refusal(error: &Error) -> Vec<u8> {
    let mut body = Vec::new();
    put_error(&mut body, error);
    let mut out = Vec::with_capacity(HEADER_BYTES + body.len());
    Answer { kind: Kind::Refusal, items: 0, body_bytes: body.len(), id: 0, payload_bytes: 0 }.encode(&mut out);
    out.extend_from_slice(&body);
    out
}

/// The error of a refusal's body.
pub fn get_refusal(mut body: &[u8]) -> Result<Error, Error> {
    get_error(&mut body)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn access() -> ReadAccess {
        let replica = v1::Replica {
            replica_id: 2,
            segment_id: 3,
            incarnation: 4,
            node_id: 5,
            offset: 6,
            length: 7,
            kind: 1,
            expires_log_time_ms: 8,
            mac: Bytes::from_static(&[9; 16]),
        };
        ReadAccess { object_id: 1, replica, offset: 10, length: 11 }
    }

    #[test]
    fn records_round_trip_and_may_grow() {
        let mut record = Vec::new();
        put_read(&mut record, &access());
        assert_eq!(record.len(), RECORD_BYTES);
        assert_eq!(get_record(&record).unwrap(), access());
        record.extend_from_slice(&[0xff; 40]);
        assert_eq!(get_record(&record).unwrap(), access());
        assert_eq!(get_record(&record[..RECORD_BYTES - 1]).unwrap_err().code(), ErrorCode::BadFrame);
    }

    #[test]
    fn statuses_round_trip() {
        let error = Error::new(ErrorCode::OutOfBounds, "é".repeat(MESSAGE_BYTES_MAX)).retry_after(7);
        let mut body = Vec::new();
        put_read_statuses(&mut body, &[Ok(()), Err(error.clone())]);
        let back = get_read_statuses(&body, 2).unwrap();
        assert!(back[0].is_ok());
        let cut = back[1].as_ref().unwrap_err();
        assert_eq!((cut.code(), cut.retry_after_ms()), (ErrorCode::OutOfBounds, 7));
        assert!(error.message().starts_with(cut.message()) && cut.message().len() <= MESSAGE_BYTES_MAX);

        let mut body = Vec::new();
        let stored = WriteReply { outcome: WriteOutcome::Stored, error: None, proof: [1; 16] };
        let refused = Error::new(ErrorCode::Fenced, "fenced");
        let aborted = WriteReply { outcome: WriteOutcome::Aborted, error: Some(refused.clone()), proof: [2; 16] };
        for status in [Ok(stored.clone()), Ok(aborted), Err(refused.clone())] {
            put_write_status(&mut body, &status);
        }
        let back = get_write_statuses(&body, 3).unwrap();
        assert_eq!(back[0], Ok(stored));
        assert_eq!(back[1], Err(WriteError { error: refused.clone(), aborted: Some([2; 16]) }));
        assert_eq!(back[2], Err(WriteError::unclean(refused)));
        for cut in 0..body.len() {
            assert!(get_write_statuses(&body[..cut], 3).is_err());
        }
    }

    proptest! {
        #[test]
        fn headers_round_trip(items in 1..=FRAME_ITEMS_MAX, remaining_ms: u32, id: u64, payload_bytes: u64) {
            let request = Request { kind: Kind::Write, items, record_bytes: RECORD_BYTES, remaining_ms, id, payload_bytes };
            let mut out = Vec::new();
            request.encode(&mut out);
            prop_assert_eq!(Request::decode(&out[..].try_into().unwrap()).unwrap(), request);
            let answer = Answer { kind: Kind::Read, items, body_bytes: 5, id, payload_bytes };
            let mut out = Vec::new();
            answer.encode(&mut out);
            prop_assert_eq!(Answer::decode(&out[..].try_into().unwrap()).unwrap(), answer);
        }

        /// Whatever arrives, decoding ends in an error or in something within the limits.
        #[test]
        fn garbage_is_refused_or_bounded(mut bytes: [u8; HEADER_BYTES], body: Vec<u8>, keep_magic: bool, items in 0usize..2000) {
            if keep_magic {
                bytes[..4].copy_from_slice(b"TPq1");
            }
            if let Ok(request) = Request::decode(&bytes) {
                prop_assert!(request.items * request.record_bytes <= FRAME_ITEMS_MAX * RECORD_BYTES_MAX);
            }
            if keep_magic {
                bytes[..4].copy_from_slice(b"TPr1");
            }
            if let Ok(answer) = Answer::decode(&bytes) {
                prop_assert!(answer.body_bytes <= BODY_BYTES_MAX);
            }
            let _ = (get_record(&body), get_read_statuses(&body, items), get_write_statuses(&body, items), get_refusal(&body));
        }
    }
}
