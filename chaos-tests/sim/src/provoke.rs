//! The circumstances in which each planted bug matters. They alone are no mistake: with the guard in place such a run passes.

use std::time::Duration;

use tidepool_master::FailoverReclaim;
use tidepool_proto::plant::Plant;

use crate::params::{Fault, Params};

/// The circumstances in which a guard matters, made likelier.
pub fn provoke(mut params: Params, plant: Plant) -> Params {
    let mut need = |faults: &[Fault]| {
        for fault in faults {
            if !params.faults.contains(fault) {
                params.faults.push(*fault);
            }
        }
    };
    // Where bits flip by themselves, bytes that went bad otherwise are not noticed.
    let bytes_matter = matches!(
        plant,
        Plant::SkipVerification
            | Plant::EarlyReuse
            | Plant::LookBeforeMark
            | Plant::TrustReporter
            | Plant::FenceWithoutAbort
    );
    match plant {
        Plant::NoReadFence => {
            need(&[Fault::IsolateMaster, Fault::CutMasters]);
            params.readers = 2;
        }
        // First attempts that are overtaken, and keys that are leased now and then: what is refused must be free again when the
        // first attempt arrives.
        Plant::ForgottenRefusal => {
            (params.overtaken, params.keys, params.clients, params.readers) = (700, 6, 3, 0);
            (params.faults, params.faults_for) = (Vec::new(), Duration::from_secs(8));
        }
        // Little space, and much of it wanted: evictions.
        Plant::PartOfGroup | Plant::EvictPinned => {
            (params.segment_bytes, params.object_bytes_max, params.keys) = (64 << 10, 16_000, 8);
            (params.special.groups, params.special.pins) = (plant == Plant::PartOfGroup, plant == Plant::EvictPinned);
            (params.replicas_max, params.special.quota_objects) = (2, 0);
        }
        Plant::ConstantHistory => {
            need(&[Fault::RestoreMasters, Fault::LoseMajority, Fault::Compact]);
            (params.snapshot_entries, params.faults_for) = (60, Duration::from_secs(6));
        }
        Plant::ForgottenLog => {
            (params.faults, params.faults_for) = (vec![Fault::LoseMajority, Fault::Compact], Duration::from_secs(6));
        }
        Plant::UncheckedFrame => {
            (params.faults, params.faults_for) = (vec![Fault::FlipMasterBit], Duration::from_secs(6));
        }
        Plant::OverQuota => (params.keys, params.special.quota_objects) = (8, 1),
        // New leaders, and datanodes that hear late of them.
        Plant::TimeAheadOfLog => {
            need(&[Fault::IsolateMaster, Fault::HandOver, Fault::KillMaster]);
            (params.faults_for, params.readers) = (Duration::from_secs(8), 2);
        }
        // One leader all the time: what a failover does to log time is not to be blamed.
        Plant::WallClock => {
            (params.faults, params.faults_for) = (vec![Fault::StepClock], Duration::from_secs(8));
            (params.late, params.stalls) = ((0, 1), 100);
        }
        Plant::ListUnheard => {
            params.faults = vec![Fault::KillDatanode, Fault::KillMaster, Fault::HandOver];
            (params.faults_for, params.datanode_returns) = (Duration::from_secs(8), 10);
        }
        Plant::TrustReporter => need(&[Fault::CutDatanode]),
        Plant::SnapshotWithoutPart => need(&[Fault::Compact, Fault::KillMaster]),
        Plant::LateDuplicate => params.late = (60, 1_500),
        Plant::SkipVerification => params.stalls = 200,
        Plant::FenceWithoutAbort => {
            (params.stalls, params.segment_bytes) = (250, 64 << 10);
        }
        Plant::EarlyReuse | Plant::DoubleGrant => (params.segment_bytes, params.stalls) = (64 << 10, 100),
        // A slow log: time between the look and the removal.
        Plant::LookBeforeMark => {
            (params.segment_bytes, params.stalls, params.sync_us) = (64 << 10, 100, 20_000);
            (params.keys, params.clients, params.faults) = (2, 4, Vec::new());
        }
        _ => {}
    }
    if bytes_matter {
        params.reclaim = FailoverReclaim::Protect;
        params.faults.retain(|fault| *fault != Fault::FlipBit);
    }
    params
}
