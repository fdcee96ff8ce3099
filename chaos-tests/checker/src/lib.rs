//! The judge of what clients saw, key by key: is there an order of their calls in which every answer is right?
//!
//! The simulation (`tidepool-sim`) and the tests with real processes (`tidepool-chaos-tests`) log calls as [`Call`]s, each in its own way,
//! and have them judged here. It knows nothing of how they were made: no clock, no client, no master.
//!
//! Start with [`judge`]; [`Event`] says what a call can have done. Two other judges that it is compared with are beside the simulation
//! (`chaos-tests/sim/tests/judge.rs`).

mod event;
mod search;

pub use event::{Call, Event, LOG, Value, object_of, value};
pub use search::{STEPS_MAX, Verdict, judge, judge_all, minimal, step};
