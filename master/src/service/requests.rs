//! What is looked at in a request before anything is proposed, and how its results are counted.

use tidepool_proto::keys::check_key;
use tidepool_proto::object::OBJECT_BYTES_MAX;
use tidepool_proto::{Error, ErrorCode, v1};

use super::core::{Service, uuid};
use super::options::BATCH_ITEMS_MAX;
use crate::directory::{SessionId, SoftPinAction, Token};

/// A session that is there is needed. Said of the whole call, before anything is proposed: its client says hello again and repeats it.
pub fn check_open(service: &Service, session: SessionId) -> Result<(), Error> {
    check_session(session)?;
    service.tenure()?;
    match service.directory().session(session) {
        Some(_) => Ok(()),
        None => {
            let message = format!("session {session} is unknown or expired; say hello again");
            Err(Error::new(ErrorCode::SessionUnknown, message))
        }
    }
}

/// A session is needed.
pub fn check_session(session: SessionId) -> Result<(), Error> {
    if session.0 == 0 {
        return Err(Error::new(ErrorCode::SessionUnknown, "no session: say hello first"));
    }
    Ok(())
}

/// A batch has this many items at most.
pub fn check_count(items: usize) -> Result<(), Error> {
    if items == 0 || items > BATCH_ITEMS_MAX {
        return Err(Error::new(
            ErrorCode::InvalidParams,
            format!("{items} items in one call; it takes 1 to {BATCH_ITEMS_MAX}"),
        ));
    }
    Ok(())
}

/// What is wrong with an item of a put by itself.
pub fn check_item(item: &v1::PutStartItem) -> Result<Token, Error> {
    check_key(&item.key)?;
    if item.length == 0 || item.length > OBJECT_BYTES_MAX {
        let (key, length) = (String::from_utf8_lossy(&item.key), item.length);
        return Err(Error::new(
            ErrorCode::InvalidParams,
            format!("key '{key}' has a value of {length} bytes; it must be 1 to {OBJECT_BYTES_MAX}"),
        ));
    }
    uuid(&item.token, "token")
}

/// A soft pin as asked for; its time has a default.
pub fn soft_pin(service: &Service, action: i32, ttl_ms: u32) -> Result<SoftPinAction, Error> {
    let default_ms = service.options().soft_pin_ttl_default.as_millis() as u64;
    let ttl_ms = u64::from(ttl_ms);
    match v1::SoftPinAction::try_from(action) {
        Ok(v1::SoftPinAction::Enable) => {
            Ok(SoftPinAction::Enable { ttl_ms: if ttl_ms == 0 { default_ms } else { ttl_ms } })
        }
        Ok(_) if ttl_ms != 0 => {
            Err(Error::new(ErrorCode::InvalidParams, "a soft pin's time is given only when it is enabled"))
        }
        Ok(v1::SoftPinAction::Disable) => Ok(SoftPinAction::Disable),
        Ok(v1::SoftPinAction::Preserve) => Ok(SoftPinAction::Preserve),
        Err(_) => Err(Error::new(ErrorCode::InvalidParams, format!("unknown soft pin action {action}"))),
    }
}

/// Counts a batch's results by code.
pub fn count<'a>(service: &Service, op: &str, errors: impl Iterator<Item = Option<&'a v1::ItemError>>) {
    let mut ok = 0;
    for error in errors {
        match error {
            None => ok += 1,
            Some(error) => service.metrics().count(op, ErrorCode::of_item(error), 1),
        }
    }
    service.metrics().count(op, ErrorCode::Ok, ok);
}
