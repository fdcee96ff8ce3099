//! What the log is replicated into, as seen from here: a deterministic machine fed with committed payloads in log
//! order, that can hand over and take in its whole state.

use std::fmt;
use std::io;

/// Place of an entry in the log.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LogPosition {
    /// Term of the leader that wrote the entry.
    pub term: u64,
    /// Index of the entry.
    pub index: u64,
}

impl fmt::Display for LogPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.index, self.term)
    }
}

/// Feature levels (M6).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Levels {
    /// Of the state: what may be in its log.
    pub state: u16,
    /// The highest that this binary can apply.
    pub binary: u16,
}

/// [`StateMachine::admits`] as the log asks it.
pub(crate) type AdmitPayload = dyn Fn(&[u8]) -> Result<(), MachineError> + Send + Sync;

/// The state machine. Called by one apply task, in log order; readers look at it from any thread.
pub trait StateMachine: Send + Sync + 'static {
    /// What applying a payload answers to whoever proposed it.
    type Outcome: fmt::Debug + Send + Sync + 'static;

    /// Applies one committed payload. `Err` is fatal (M1): the node stops, and the caller's process must end.
    fn apply(&self, at: LogPosition, payload: &[u8]) -> Result<Self::Outcome, MachineError>;

    /// The same where operators had some ops of the entry recorded as refused (M1), by their ordinals.
    fn apply_skipping(&self, at: LogPosition, _payload: &[u8], skipped: &[u32]) -> Result<Self::Outcome, MachineError> {
        Err(MachineError::new(format!("entry {at}: this machine cannot leave out ops {skipped:?}")))
    }

    /// A committed entry without payload (a new term's first entry, a membership change): only the position moves.
    fn skip(&self, at: LogPosition);

    /// Whether this binary could apply the payload (M6). Asked of what lies in the log before this member takes part, and of
    /// what a leader sends before it is acknowledged. Reads no more than the payload's head.
    fn admits(&self, _payload: &[u8]) -> Result<(), MachineError> {
        Ok(())
    }

    /// The same of a whole state that [`Frozen::write_to`] wrote.
    fn admits_state(&self, _input: &mut dyn io::Read) -> Result<(), MachineError> {
        Ok(())
    }

    /// The feature levels of state and binary.
    fn levels(&self) -> Levels {
        Levels { state: 1, binary: 1 }
    }

    /// Position of the last applied entry, or none before the first.
    fn applied(&self) -> Option<LogPosition>;

    /// Takes the whole state at the applied position, to be written beside the apply task. Must be quick.
    fn freeze(&self) -> Box<dyn Frozen>;

    /// The state frozen at `index` turned out to be [`Unsound`]: nothing of it was kept. Whether this member is wrong is for the
    /// next comparison with the others to say (M3).
    fn found_unsound(&self, _index: u64, _why: &str) {}

    /// Replaces the whole state by one that [`Frozen::write_to`] wrote at `at`. If that fails the state is as before.
    fn install(&self, at: LogPosition, input: &mut dyn io::Read) -> Result<(), MachineError>;
}

/// A frozen state cannot be written any more: the machine took in another state meanwhile, and a newer snapshot with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the state was replaced before its snapshot was written")]
pub struct Replaced;

impl Replaced {
    /// Whether this is why a write failed.
    pub fn caused(error: &io::Error) -> bool {
        error.get_ref().is_some_and(|cause| cause.is::<Replaced>())
    }
}

impl From<Replaced> for io::Error {
    fn from(replaced: Replaced) -> io::Error {
        io::Error::other(replaced)
    }
}

/// A frozen state is not what it was known to be: its records do not sum up to the digest that was kept of them (M2). Nothing
/// of it may be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Unsound(pub String);

impl Unsound {
    /// What does not fit, if this is why a write failed.
    pub fn cause(error: &io::Error) -> Option<&Unsound> {
        error.get_ref().and_then(|cause| cause.downcast_ref())
    }
}

impl From<Unsound> for io::Error {
    fn from(unsound: Unsound) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, unsound)
    }
}

/// The whole state at one position, detached from the machine.
pub trait Frozen: Send {
    /// Writes it out. Runs on its own thread while the machine goes on. Fails with [`Replaced`] when the machine took in
    /// another state meanwhile, and with [`Unsound`] when the state is not what it was known to be.
    fn write_to(self: Box<Self>, out: &mut dyn io::Write) -> io::Result<()>;
}

/// The machine cannot go on: a violated assumption or a state it cannot read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{message}")]
pub struct MachineError {
    /// What was violated.
    pub message: String,
    /// Which op of the entry it was, if one alone; operators may have it skipped.
    pub ordinal: Option<u32>,
}

impl MachineError {
    /// From a sentence that names what was violated.
    pub fn new(message: impl Into<String>) -> MachineError {
        MachineError { message: message.into(), ordinal: None }
    }

    /// Names the op of the entry.
    pub fn at_op(self, ordinal: u32) -> MachineError {
        MachineError { ordinal: Some(ordinal), ..self }
    }
}
