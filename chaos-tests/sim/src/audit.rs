//! What is left when everything works again: nothing lost, nothing leaked, one state everywhere.

use std::time::Duration;

use openraft::async_runtime::AsyncRuntime;
use openraft_rt_sim::SimRuntime;

use crate::datanode::Process;
use crate::history::now;
use crate::quorum::Quorum;

/// How long everything may take until it works again.
pub const ALIVE_AFTER: Duration = Duration::from_secs(40);
/// How long space may take until it came back.
const SETTLED_AFTER: Duration = Duration::from_secs(40);
const LOOK: Duration = Duration::from_millis(100);

/// Waits until `what` is so.
pub async fn until(what: &str, limit: Duration, mut check: impl FnMut() -> Result<(), String>) -> Result<(), String> {
    let deadline = now() + limit.as_nanos() as u64;
    loop {
        match check() {
            Ok(()) => return Ok(()),
            Err(why) if now() > deadline => return Err(format!("{what}: not within {limit:?}: {why}")),
            Err(_) => SimRuntime::sleep(LOOK).await,
        }
    }
}

/// A leader leads, and every datanode follows it.
pub async fn alive(quorum: &Quorum, datanodes: &[Process]) -> Result<(), String> {
    until("LIVENESS", ALIVE_AFTER, || {
        for running in quorum.running() {
            if let Some(fatal) = running.node.status().fatal {
                return Err(format!("master {} stopped: {fatal}", running.machine.id));
            }
        }
        let leader = quorum.leader().ok_or("nobody leads")?;
        let term = leader.node.status().leadership.term;
        for node in datanodes {
            if node.follows() != Some(term) {
                return Err(format!("datanode {} follows {:?}, the term is {term}", node.machine.id, node.follows()));
            }
        }
        let counts = leader.master.directory().counts();
        match counts.suspect_nodes {
            0 => Ok(()),
            suspect => Err(format!("{suspect} datanodes are suspect")),
        }
    })
    .await
}

/// Nothing is open, nothing retired, all masters agree, and the space adds up.
pub async fn settled(quorum: &Quorum, datanodes: &[Process]) -> Result<(), String> {
    until("NOTHING LEAKED", SETTLED_AFTER, || {
        let leader = quorum.leader().ok_or("nobody leads")?;
        let counts = leader.master.directory().counts();
        if counts.processing > 0 || counts.retired_clean > 0 || counts.retired_unclean > 0 {
            return Err(format!("{counts:?}"));
        }
        match datanodes.iter().map(|node| node.node.open_writes()).sum() {
            0usize => Ok(()),
            open => Err(format!("{open} writes are open")),
        }
    })
    .await?;
    until("SAME-INDEX-SAME-HASH", SETTLED_AFTER, || {
        let stands = quorum.running().into_iter().map(|running| {
            let directory = running.master.directory();
            (running.machine.id, directory.applied().map(|(index, _)| index), directory.digest())
        });
        let stands: Vec<_> = stands.collect();
        match stands.windows(2).all(|pair| (pair[0].1, pair[0].2) == (pair[1].1, pair[1].2)) {
            true => Ok(()),
            false => Err(format!("{stands:?}")),
        }
    })
    .await?;
    for running in quorum.running() {
        let (id, directory) = (running.machine.id, running.master.directory());
        directory.check_invariants().map_err(|why| format!("master {id}: {why}"))?;
        for segment in directory.segments() {
            let sum = segment.free + segment.processing + segment.complete + segment.retired;
            if sum != segment.capacity {
                let capacity = segment.capacity;
                return Err(format!("SPACE-ADDS-UP: master {id} segment {}: {sum} of {capacity}", segment.name));
            }
        }
        let violations = running.master.readiness().audit_violations;
        if violations > 0 {
            return Err(format!("master {id}: its auditor found {violations} violations"));
        }
    }
    Ok(())
}
