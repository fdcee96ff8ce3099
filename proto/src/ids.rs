//! Identities. Object, replica, segment and incarnation ids name the op that created the thing:
//! (log index, ordinal in the entry, slot). Together with the history they are never reused (I1).

use std::fmt;

/// Ops an entry may carry; fixes the width of the ordinal in an id (M5).
pub const OPS_PER_ENTRY_MAX: usize = 1 << 10;
/// Things one op may create (an object and its replicas); fixes the width of the slot in an id.
pub const SLOTS_PER_OP_MAX: usize = 1 << 4;
/// Most replicas one put may ask for: slot 0 is the object itself.
pub const REPLICAS_PER_OBJECT_MAX: usize = SLOTS_PER_OP_MAX - 1;

/// Position of an op: 50 bits of log index, 10 bits of ordinal, 4 bits of slot. Zero names nothing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct OpId(pub u64);

impl OpId {
    /// Packs a position. Log index must be below 2^50, which at 10^6 entries a second lasts 35 years.
    pub fn new(log_index: u64, ordinal: usize, slot: usize) -> OpId {
        assert!(log_index < 1 << 50, "log index {log_index} does not fit an id");
        assert!(ordinal < OPS_PER_ENTRY_MAX && slot < SLOTS_PER_OP_MAX, "ordinal {ordinal} slot {slot}");
        OpId(log_index << 14 | (ordinal as u64) << 4 | slot as u64)
    }
    /// The same op's thing number `slot`.
    pub fn with_slot(self, slot: usize) -> OpId {
        assert!(slot < SLOTS_PER_OP_MAX, "slot {slot}");
        OpId(self.0 & !0xf | slot as u64)
    }
    /// Log index of the op.
    pub fn log_index(self) -> u64 {
        self.0 >> 14
    }
    /// Place of the op in its entry.
    pub fn ordinal(self) -> usize {
        (self.0 >> 4 & 0x3ff) as usize
    }
    /// Which of the op's things.
    pub fn slot(self) -> usize {
        (self.0 & 0xf) as usize
    }
}

impl fmt::Debug for OpId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.log_index(), self.ordinal(), self.slot())
    }
}

macro_rules! op_id_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub u64);
        impl $name {
            /// The op that created it, and its slot there.
            pub fn op(self) -> OpId {
                OpId(self.0)
            }
        }
        impl From<OpId> for $name {
            fn from(id: OpId) -> Self {
                $name(id.0)
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({:?})", stringify!($name), OpId(self.0))
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", OpId(self.0))
            }
        }
    };
}

op_id_type!(
    /// One put of one key: its PutStart op, slot 0.
    ObjectId
);
op_id_type!(
    /// One copy of an object: the op that allocated it, slot 1 and up.
    ReplicaId
);
op_id_type!(
    /// One mounted memory region: its Mount op.
    SegmentId
);
op_id_type!(
    /// One life of a datanode process: its Register op. Memory addresses are valid only within one.
    Incarnation
);

macro_rules! plain_id_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
        pub struct $name(pub u64);
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

plain_id_type!(
    /// A master's id, a setting; or a datanode's id, the op that first registered its persistent uuid.
    NodeId
);
plain_id_type!(
    /// Random number of this life of the directory; drawn at bootstrap and at every restore.
    History
);
plain_id_type!(
    /// Replicated time in milliseconds: advances only while a leader is in office, by its CLOCK_BOOTTIME (T1).
    LogTime
);

/// The cluster's UUID, drawn once at bootstrap.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ClusterId(pub [u8; 16]);

impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, byte) in self.0.iter().enumerate() {
            if matches!(i, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClusterId({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn op_id_round_trips_its_parts() {
        for (index, ordinal, slot) in [(0, 0, 0), (1, 2, 3), ((1 << 50) - 1, 1023, 15)] {
            let id = OpId::new(index, ordinal, slot);
            assert_eq!((id.log_index(), id.ordinal(), id.slot()), (index, ordinal, slot));
        }
    }

    #[test]
    fn op_ids_order_as_the_log() {
        assert!(OpId::new(5, 1023, 15) < OpId::new(6, 0, 0));
        assert!(OpId::new(5, 1, 15) < OpId::new(5, 2, 0));
    }
}
