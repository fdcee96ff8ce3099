//! Exit codes: what a script can rely on. The table in the book's command reference is checked against this one.

use std::fmt;

use tidepool_master::MasterError;
use tidepool_master::restore::RestoreFailed;
use tidepool_proto::{Error, ErrorCode};
use tidepool_raft::OpenError;

/// How the process ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Exit {
    /// Everything that was asked for was done.
    Success = 0,
    /// It failed, and no other code says how.
    Failure = 1,
    /// The command line or the configuration is wrong; nothing was tried.
    Usage = 2,
    /// No such object.
    NotFound = 3,
    /// A different object has this key already.
    AlreadyExists = 4,
    /// No answer in time, or no quorum, or a named limit is reached: the same command may succeed later.
    TryLater = 5,
    /// Some items of a batch succeeded and some failed.
    Partial = 6,
    /// Bytes did not match their checksum, or local storage is damaged.
    Corrupt = 7,
    /// This master left its quorum, which goes on without it.
    Removed = 8,
    /// The masters hold different states.
    Diverged = 9,
}

impl Exit {
    /// Every code, with what it means.
    #[cfg(test)]
    pub const ALL: &'static [(Exit, &'static str)] = &[
        (Exit::Success, "everything that was asked for was done"),
        (Exit::Failure, "it failed, and no other code says how"),
        (Exit::Usage, "the command line or the configuration is wrong; nothing was tried"),
        (Exit::NotFound, "no such object"),
        (Exit::AlreadyExists, "an object has this key already"),
        (
            Exit::TryLater,
            "no answer in time, no quorum, or a named limit is reached; the same command may succeed later",
        ),
        (Exit::Partial, "some items of a batch succeeded and some failed"),
        (Exit::Corrupt, "bytes did not match their checksum, or local storage is damaged"),
        (Exit::Removed, "this master left its quorum, which goes on without it; do not start it again"),
        (Exit::Diverged, "the masters hold different states, or this one cannot start over from what they agree on"),
    ];

    /// The code that fits an error.
    pub fn of(code: ErrorCode) -> Exit {
        match code {
            ErrorCode::Ok => Exit::Success,
            ErrorCode::ObjectNotFound => Exit::NotFound,
            ErrorCode::ObjectAlreadyExists => Exit::AlreadyExists,
            ErrorCode::InvalidParams | ErrorCode::InvalidKey => Exit::Usage,
            ErrorCode::MemberRemoved => Exit::Removed,
            ErrorCode::StateDiverged => Exit::Diverged,
            ErrorCode::ChecksumMismatch | ErrorCode::StorageCorrupt => Exit::Corrupt,
            code if code.is_retryable() => Exit::TryLater,
            _ => Exit::Failure,
        }
    }

    /// The code of a batch: all one way, or partial.
    pub fn of_batch<'a>(results: impl Iterator<Item = Option<&'a Error>>) -> Exit {
        let codes: Vec<Exit> =
            results.map(|error| error.map_or(Exit::Success, |error| Exit::of(error.code()))).collect();
        match codes.first() {
            None => Exit::Success,
            Some(first) if codes.iter().all(|code| code == first) => *first,
            Some(_) if codes.contains(&Exit::Success) => Exit::Partial,
            Some(_) => Exit::Failure,
        }
    }
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> std::process::ExitCode {
        std::process::ExitCode::from(exit as u8)
    }
}

/// A failure that knows its exit code.
#[derive(Debug)]
pub struct Failed {
    /// How to end.
    pub exit: Exit,
    /// Why, for stderr.
    pub message: String,
}

impl Failed {
    /// A wrong command line or configuration.
    pub fn usage(message: impl fmt::Display) -> anyhow::Error {
        anyhow::Error::new(Failed { exit: Exit::Usage, message: message.to_string() })
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failed {}

/// Stable name of a code, as `explain` and the book use it.
pub fn code_name(code: ErrorCode) -> String {
    format!("TP{:04}", code as u32)
}

/// One line for stderr: name, code and facts.
pub fn describe(error: &Error) -> String {
    format!("{} ({}): {}", error.code().name(), code_name(error.code()), error.message())
}

/// Exit code and message of whatever went wrong.
pub fn classify(error: &anyhow::Error) -> (Exit, String) {
    if let Some(failed) = error.downcast_ref::<Failed>() {
        return (failed.exit, failed.message.clone());
    }
    match error.chain().find_map(known) {
        Some(known) => {
            (Exit::of(known.code()), format!("{error:#}; see: tidepool explain {}", code_name(known.code())))
        }
        None => (Exit::Failure, format!("{error:#}")),
    }
}

/// The coded error that a cause is or wraps. Errors that pass on the one they wrap have it in no chain.
fn known<'a>(cause: &'a (dyn std::error::Error + 'static)) -> Option<&'a Error> {
    let opened = |error: &'a OpenError| &error.0;
    let started = |error: &'a MasterError| match error {
        MasterError::Options(error) => Some(error),
        MasterError::Raft(error) => Some(opened(error)),
        _ => None,
    };
    let restored = |error: &'a RestoreFailed| match error {
        RestoreFailed::Refused(error) => Some(error),
        RestoreFailed::Open(error) => Some(opened(error)),
        _ => None,
    };
    (cause.downcast_ref::<Error>())
        .or_else(|| cause.downcast_ref().map(opened))
        .or_else(|| cause.downcast_ref().and_then(started))
        .or_else(|| cause.downcast_ref().and_then(restored))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fails with `Error` alone looked for: a master that could not start ended with 1, whatever the reason.
    #[test]
    fn a_master_that_cannot_start_ends_with_the_code_of_its_reason() {
        let corrupt = || OpenError(Error::new(ErrorCode::StorageCorrupt, "a bit"));
        for error in [
            anyhow::Error::new(corrupt()),
            anyhow::Error::new(MasterError::from(corrupt())),
            anyhow::Error::new(RestoreFailed::from(corrupt())).context("a restore"),
            anyhow::Error::new(RestoreFailed::from(Error::new(ErrorCode::StorageCorrupt, "a bit"))),
        ] {
            let (exit, message) = classify(&error);
            assert_eq!(exit, Exit::Corrupt, "{message}");
            assert!(message.contains("a bit"), "{message}");
        }
    }

    #[test]
    fn codes_are_dense_and_the_book_lists_them() {
        let page = include_str!("../../docs/reference/cli.md");
        for (at, (exit, meaning)) in Exit::ALL.iter().enumerate() {
            assert_eq!(*exit as usize, at);
            assert!(
                page.contains(&format!("| {at} | {meaning} |")),
                "docs/reference/cli.md must say '| {at} | {meaning} |'"
            );
        }
    }

    #[test]
    fn a_batch_is_partial_only_when_something_succeeded() {
        let missing = Error::new(ErrorCode::ObjectNotFound, "x");
        let full = Error::new(ErrorCode::NoSpace, "x");
        assert_eq!(Exit::of_batch([None, None].into_iter()), Exit::Success);
        assert_eq!(Exit::of_batch([Some(&missing)].into_iter()), Exit::NotFound);
        assert_eq!(Exit::of_batch([None, Some(&missing)].into_iter()), Exit::Partial);
        assert_eq!(Exit::of_batch([Some(&full), Some(&missing)].into_iter()), Exit::Failure);
    }

    #[test]
    fn an_error_inside_context_keeps_its_exit_code() {
        use anyhow::Context;
        let error = Err::<(), _>(Error::new(ErrorCode::ObjectNotFound, "key 'k'")).context("get").unwrap_err();
        let (exit, message) = classify(&error);
        assert_eq!(exit, Exit::NotFound);
        assert!(message.contains("TP0020") && message.contains("key 'k'"), "{message}");
    }
}
