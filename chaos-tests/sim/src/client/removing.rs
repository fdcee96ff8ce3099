//! Removals by key and by match, and pins.

use std::time::Duration;

use tidepool_proto::ErrorCode;
use tidepool_proto::clock::BootInstant;
use tidepool_proto::v1;
use tidepool_proto::v1::client_request::Body as Ask;
use tidepool_proto::v1::client_response::Body as Answer;

use super::{CALL, Client};
use crate::history::{Event, now};
use crate::keys::key_name;
use crate::quorum::LEASE_MAX;

impl Client {
    /// Removes a key.
    pub async fn remove(&mut self, key: u64, force: bool) {
        let (invoked, deadline) = (now(), BootInstant::now().after(CALL));
        self.about(key);
        let sequence = self.next_sequence();
        let mode = if force { v1::RemoveMode::Force } else { v1::RemoveMode::RespectLease };
        let request = v1::RemoveRequest {
            session_id: self.session,
            sequence,
            floor: sequence,
            keys: Some(v1::Keys::pack([key_name(key)])),
            mode: mode as i32,
        };
        if self.random.below(1_000) < self.overtaken {
            // Longer than an attempt is waited for, and about as long as a lease may be.
            self.first_is_late = Duration::from_millis(self.random.range(300, LEASE_MAX.as_millis() as u64));
        }
        match self.ask(Ask::Remove(request), deadline).await {
            Ok(Answer::Remove(answer)) => match answer.errors.first().map(|error| ErrorCode::from_u32(error.code)) {
                None | Some(ErrorCode::Ok) => self.history.log(self.machine.id, key, invoked, true, Event::Removed),
                Some(ErrorCode::ObjectNotFound) => {
                    self.history.log(self.machine.id, key, invoked, true, Event::NothingToRemove);
                }
                Some(ErrorCode::SessionUnknown) => drop(self.hello(deadline.after(CALL)).await),
                Some(ErrorCode::Internal) => self.history.wrong(format!("a removal answered {:?}", answer.errors)),
                // Refused, and remembered under its number: no attempt of it removes any more (W8).
                Some(ErrorCode::ObjectHasLease | ErrorCode::NotReady) => {}
                Some(_) => self.history.log(self.machine.id, key, invoked, false, Event::Removed),
            },
            Ok(_) => {}
            Err(failed) if failed.is_open => {
                self.history.log(self.machine.id, key, invoked, false, Event::Removed);
            }
            Err(failed) if failed.error.code() == ErrorCode::SessionUnknown => {
                self.hello(deadline.after(CALL)).await;
            }
            Err(_) => {}
        }
    }

    /// Removes what is found under a prefix that only this key has.
    pub async fn remove_matching(&mut self, key: u64, force: bool) {
        let (invoked, deadline) = (now(), BootInstant::now().after(CALL));
        self.about(key);
        let sequence = self.next_sequence();
        let mode = if force { v1::RemoveMode::Force } else { v1::RemoveMode::RespectLease };
        let request = v1::RemoveMatchingRequest {
            session_id: self.session,
            sequence,
            floor: sequence,
            prefix: key_name(key).into(),
            mode: mode as i32,
            ..Default::default()
        };
        match self.ask(Ask::RemoveMatching(request), deadline).await {
            Ok(Answer::RemoveMatching(answer)) if answer.removed == 1 => {
                self.history.log(self.machine.id, key, invoked, true, Event::Removed);
            }
            // What was found had been replaced when it was to go, or is leased, or there was nothing.
            Ok(Answer::RemoveMatching(answer)) if answer.removed == 0 => {}
            Ok(answer) => self.history.wrong(format!("a removal by match of one key answered {answer:?}")),
            Err(failed) if failed.is_open => {
                self.history.log(self.machine.id, key, invoked, false, Event::Removed);
            }
            Err(failed) if failed.error.code() == ErrorCode::SessionUnknown => {
                self.hello(deadline.after(CALL)).await;
            }
            Err(_) => {}
        }
    }

    /// Sets or ends a soft pin, which shows in no answer: it changes what is evicted first.
    pub async fn pin(&mut self, key: u64) {
        self.about(key);
        let action = match self.random.chance(50) {
            true => v1::SoftPinAction::Enable,
            false => v1::SoftPinAction::Disable,
        };
        let keys = Some(v1::Keys::pack([key_name(key)]));
        let request = v1::PinRequest { keys, action: action as i32, ttl_ms: 0 };
        drop(self.ask(Ask::Pin(request), BootInstant::now().after(CALL)).await);
    }
}
