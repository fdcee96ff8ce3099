//! What a client is started with, and every limit it keeps.

use std::sync::Arc;
use std::time::Duration;

use tidepool_proto::{Address, Error, ErrorCode};

use crate::plane::EngineFactory;
use crate::resolver::{Resolve, SystemResolver};

/// Port of a master when an address names none.
pub const MASTER_PORT_DEFAULT: u16 = 50051;
/// A call may return this much after its deadline, never more (R4).
pub const DEADLINE_ALLOWANCE: Duration = Duration::from_millis(50);
/// Deadline of a call that names none.
pub const DEADLINE_DEFAULT: Duration = Duration::from_secs(5);

/// How a [`crate::Client`] is started.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Masters to ask for the leader. One reachable member is enough: the others are learned.
    pub masters: Vec<Address>,
    /// Tenant whose keys this client sees; "" is the default tenant.
    pub tenant: String,
    /// Physical host of this client, for placement; may be empty.
    pub host_id: String,
    /// Deadline of calls that name none.
    pub deadline: Duration,
    /// How long `connect` looks for a leader.
    pub connect_deadline: Duration,
    /// Resolves names of masters, anew at each dial.
    pub resolver: Arc<dyn Resolve>,
    /// Makes the engine that moves payload.
    pub engine: EngineFactory,
}

impl ClientOptions {
    /// Options with defaults for these masters.
    pub fn new(masters: Vec<Address>) -> ClientOptions {
        ClientOptions {
            masters,
            tenant: String::new(),
            host_id: String::new(),
            deadline: DEADLINE_DEFAULT,
            connect_deadline: DEADLINE_DEFAULT,
            resolver: Arc::new(SystemResolver),
            engine: EngineFactory::default(),
        }
    }

    /// Parses a comma-separated list such as `h1,h2:50051,[::1]:50051`.
    pub fn parse_masters(list: &str) -> Result<Vec<Address>, Error> {
        let masters = list
            .split(',')
            .map(str::trim)
            .filter(|part| !part.is_empty())
            .map(|part| Address::parse(part, MASTER_PORT_DEFAULT))
            .collect::<Result<Vec<Address>, Error>>()?;
        if masters.is_empty() {
            return Err(Error::new(ErrorCode::InvalidParams, format!("master list '{list}' names no address")));
        }
        Ok(masters)
    }
}
