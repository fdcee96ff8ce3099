//! What an item asks for: a replica as the master signed it, and the range within its extent.

use tidepool_proto::v1;

/// A ranged read of one extent. The engine carries `replica` and `object_id` opaquely; the datanode checks them.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ReadAccess {
    /// Object the extent holds.
    pub object_id: u64,
    /// The lease, as signed by the master.
    pub replica: v1::Replica,
    /// First byte, counted from the extent's start.
    pub offset: u64,
    /// Bytes to read.
    pub length: u64,
}

/// A write that fills one extent, once.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct WriteAccess {
    /// Object the extent will hold.
    pub object_id: u64,
    /// The grant, as signed by the master.
    pub replica: v1::Replica,
    /// Bytes that will arrive; the stored form: header, checksum table, payload.
    pub length: u64,
}
