//! What a run is like, drawn from its seed: each run switches some faults on and others off, so that no fault hides another.

use std::time::Duration;

use tidepool_master::FailoverReclaim;
use tidepool_raft::ElectionProfile;
use tidepool_raft::sim::SplitMix;

use crate::keys::Keys;
use crate::quorum::{SPARES_FOR_DAMAGED, SPARES_TO_RECOVER, SPARES_TO_REPLACE};

/// Fewer kinds than this, and one of them is all that happens.
const KINDS_MIN: usize = 4;

/// How much a clock may be wrong in millionths: any two then differ by 5 % at most, which leases allow for (T2).
pub const SKEW_PPM_MAX: i64 = 25_000;
/// How much clocks are wrong in runs that show what happens beyond that.
const SKEW_PPM_WILD: i64 = 300_000;

/// The swarm's parameters.
#[derive(Clone, Debug)]
pub struct Params {
    /// Decides everything else.
    pub seed: u64,
    /// Datanodes.
    pub datanodes: u64,
    /// Clients that call everything.
    pub clients: u64,
    /// Clients that only look, and never leave a master before it refuses.
    pub readers: u64,
    /// Keys that they share.
    pub keys: u64,
    /// Bytes of each datanode's segment.
    pub segment_bytes: u64,
    /// Payload bytes of an object, at most.
    pub object_bytes_max: u64,
    /// Election timeouts.
    pub election: ElectionProfile,
    /// Entries after which a snapshot is due.
    pub snapshot_entries: u64,
    /// Entries kept behind it.
    pub keep_entries: u64,
    /// How long faults last.
    pub faults_for: Duration,
    /// Pause between two faults, at most, in milliseconds.
    pub fault_pause_ms: u64,
    /// Time of a sync, in microseconds.
    pub sync_us: u64,
    /// How much clocks of machines go wrong, in millionths, at most.
    pub skew_ppm: i64,
    /// Messages that are late, in a thousand, and by how many milliseconds at most.
    pub late: (u64, u64),
    /// Transfers that stall, in a thousand.
    pub stalls: u64,
    /// Which faults there are.
    pub faults: Vec<Fault>,
    /// How often a dead datanode comes back after a fault, in a hundred.
    pub datanode_returns: u64,
    /// Copies that a put asks for, at most.
    pub replicas_max: u32,
    /// What is special about which key.
    pub special: Keys,
    /// Removals whose first attempt is overtaken by its repetition, in a thousand.
    pub overtaken: u64,
    /// Requests that arrive twice, in a thousand.
    pub twice: u64,
    /// What a new leader does with the leases of the one before when a put needs the space (L4).
    pub reclaim: FailoverReclaim,
}

/// A kind of fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// A master loses power, with what it had not synced, perhaps a torn tail.
    KillMaster,
    /// A master stands still.
    PauseMaster,
    /// Wires between masters are cut, in one direction or both.
    CutMasters,
    /// One master is cut off from all.
    IsolateMaster,
    /// Leadership is handed over.
    HandOver,
    /// A master snapshots and purges its log.
    Compact,
    /// A write or sync of a master's disk fails.
    DiskFault,
    /// A master's time of day jumps.
    StepClock,
    /// A datanode dies; its memory is gone.
    KillDatanode,
    /// A datanode stands still.
    PauseDatanode,
    /// Wires of a datanode are cut, to masters or to clients.
    CutDatanode,
    /// A bit of a datanode's memory flips.
    FlipBit,
    /// A client is cut off.
    CutClient,
    /// A disk becomes slow.
    SlowDisk,
    /// An empty machine takes the place of a standby.
    ReplaceMaster,
    /// All masters are lost for good; one begins from the last published image in a new history, and others join it.
    RestoreMasters,
    /// All masters but one are lost for good; it goes on alone with its log in a new history, and others are taken in.
    LoseMajority,
    /// A bit of what a master has on its disk flips: of its log, or of its newest snapshot.
    FlipMasterBit,
}

impl Fault {
    /// All kinds.
    pub const ALL: &'static [Fault] = &[
        Fault::KillMaster,
        Fault::PauseMaster,
        Fault::CutMasters,
        Fault::IsolateMaster,
        Fault::HandOver,
        Fault::Compact,
        Fault::DiskFault,
        Fault::StepClock,
        Fault::KillDatanode,
        Fault::PauseDatanode,
        Fault::CutDatanode,
        Fault::FlipBit,
        Fault::CutClient,
        Fault::SlowDisk,
        Fault::ReplaceMaster,
        Fault::RestoreMasters,
    ];
}

impl Params {
    /// Of this seed.
    pub fn of(seed: u64) -> Params {
        let mut random = SplitMix::new(seed ^ 0x7069_7065);
        let share = random.range(20, 70);
        let mut faults: Vec<Fault> = Fault::ALL.iter().copied().filter(|_| random.chance(share)).collect();
        if faults.len() < KINDS_MIN {
            faults = Fault::ALL.to_vec();
        }
        // Drawn apart, so that whoever draws none of it is what it was without.
        let mut later = SplitMix::new(seed ^ 0x6c61_7465);
        if later.chance(share / 3) {
            faults.push(Fault::LoseMajority);
        }
        if later.chance(share / 2) {
            faults.push(Fault::FlipMasterBit);
        }
        let tight = random.chance(40);
        let params = Params {
            seed,
            datanodes: random.range(2, 3),
            clients: random.range(2, 4),
            keys: random.range(3, 8),
            segment_bytes: if tight { 64 << 10 } else { 512 << 10 },
            object_bytes_max: random.range(2_000, 12_000),
            election: if random.chance(50) { ElectionProfile::Lan } else { ElectionProfile::Default },
            snapshot_entries: random.range(40, 400),
            keep_entries: random.range(0, 60),
            faults_for: Duration::from_millis(random.range(2_500, 5_000)),
            fault_pause_ms: random.range(200, 900),
            sync_us: random.range(50, 3_000),
            skew_ppm: if random.chance(50) { random.range(0, SKEW_PPM_MAX as u64) as i64 } else { 0 },
            late: (random.range(0, 30), random.range(20, 1_500)),
            stalls: random.range(0, 60),
            faults,
            datanode_returns: 50,
            replicas_max: random.range(1, 2) as u32,
            readers: random.range(0, 2),
            special: Keys {
                groups: random.chance(40),
                pins: random.chance(40),
                quota_objects: if random.chance(40) { random.range(1, 2) } else { 0 },
                refuse: random.chance(50),
            },
            overtaken: random.range(0, 60),
            twice: if later.chance(50) { later.range(1, 60) } else { 0 },
            reclaim: FailoverReclaim::Protect,
        };
        if later.chance(30) { params.leases_may_break() } else { params }
    }

    /// New leaders may break leases of the one before: leaders that change, less space than is wanted, slow readers.
    pub fn leases_may_break(mut self) -> Params {
        (self.reclaim, self.stalls) = (FailoverReclaim::Allow, 120);
        (self.segment_bytes, self.object_bytes_max, self.keys, self.replicas_max) = (64 << 10, 24_000, 8, 2);
        // What is pinned for good leaves no room.
        self.special.pins = false;
        for fault in [Fault::HandOver, Fault::KillMaster] {
            if !self.faults.contains(&fault) {
                self.faults.push(fault);
            }
        }
        self
    }

    /// Spare machines that masters may be replaced by.
    pub fn spares(&self) -> u64 {
        let of = |fault, spares| if self.faults.contains(&fault) { spares } else { 0 };
        of(Fault::ReplaceMaster, SPARES_TO_REPLACE)
            + of(Fault::LoseMajority, SPARES_TO_RECOVER)
            + of(Fault::FlipMasterBit, SPARES_FOR_DAMAGED)
    }

    /// Whether leases mean the same to all.
    pub fn clocks_agree(&self) -> bool {
        self.skew_ppm <= SKEW_PPM_MAX
    }

    /// Clocks that differ by far more than they may, slow readers, and little space, so that what a lease protected is soon used again.
    pub fn wild_clocks(seed: u64) -> Params {
        let mut params = Params { skew_ppm: SKEW_PPM_WILD, segment_bytes: 64 << 10, stalls: 100, ..Params::of(seed) };
        // Bytes that went bad by themselves would be taken for those of a lease that is over.
        params.faults.retain(|fault| *fault != Fault::FlipBit);
        params
    }

    /// The same, and nothing goes wrong.
    pub fn calm(seed: u64) -> Params {
        Params { faults: Vec::new(), late: (0, 1), stalls: 0, overtaken: 0, twice: 0, skew_ppm: 0, ..Params::of(seed) }
    }
}
