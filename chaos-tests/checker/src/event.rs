//! Calls as the judge sees them: what each did to its key, when it began, and when it ended.

/// A value: a number that names the put which made it. Process tests write it into the bytes. The simulation takes the object's id and the
/// place of its history in the order of histories, since ids are used once in a history.
pub type Value = u64;

/// Who calls when no client does.
pub const LOG: u64 = 0;

/// Bits of a value that are the object's id.
const OBJECT_BITS: u32 = 56;

/// The object's id in a value.
pub fn object_of(value: Value) -> u64 {
    value & ((1 << OBJECT_BITS) - 1)
}

/// The value of an object in the history at this place in their order.
pub fn value(place: usize, object: u64) -> Value {
    object | (place as u64) << OBJECT_BITS
}

/// What a call asked, or what the surroundings did, with how it ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// A put ended well, or nobody knows how.
    Put(Value),
    /// A put found an object there.
    PutRefused,
    /// A put that replaces ended well, or nobody knows how.
    Upsert(Value),
    /// A get returned this object's bytes.
    Got(Value),
    /// A listing named an object of this id; it does not say of which history.
    Listed(u64),
    /// A get or an exist found nothing.
    Missed,
    /// An exist found an object.
    Exists,
    /// A removal removed, or nobody knows.
    Removed,
    /// A removal found nothing.
    NothingToRemove,
    /// The log says that this object went without a call: evicted, or lost with its datanode.
    Dropped(Value),
    /// The log says that this object cannot be read for now: its datanodes are suspect.
    Hidden(Value),
    /// The log says that it can be read again.
    Shown(Value),
    /// All masters were lost and one began from an image: the key is as it was in the image, whatever happened since (a stated loss).
    Restored(Option<(Value, bool)>),
}

impl Event {
    /// Whether it changes nothing: one that nobody knows the end of says nothing then.
    pub fn only_looks(self) -> bool {
        matches!(
            self,
            Event::PutRefused
                | Event::Got(_)
                | Event::Listed(_)
                | Event::Missed
                | Event::Exists
                | Event::NothingToRemove
        )
    }
}

/// One call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Call {
    /// Who called, or [`LOG`].
    pub client: u64,
    /// Key.
    pub key: u64,
    /// When it began, in nanoseconds of true time.
    pub invoked: u64,
    /// When it ended; none: nobody knows whether it took effect, it may do so for ever.
    pub returned: Option<u64>,
    /// What it did.
    pub event: Event,
}
