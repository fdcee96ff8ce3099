//! Every kind of mutation reaches a follower: it changes the state on the leader, and a follower that applied the same
//! bytes has the same digest.

use super::replay::continue_with;
use super::world::{HISTORY, World, end, register, remove};
use crate::directory::{
    ClearReplicas, Config, Contact, CopyStart, CreateTask, Directory, Op, Outcome, PutStart, Quota, ReplicaEnd,
    RetireMode, SessionId, SoftPinAction, TaskId, TaskKind, TaskState, Turn,
};
use std::collections::BTreeSet;
use tidepool_proto::capability::Secret;
use tidepool_proto::{ClusterId, History, ObjectId};

/// Kinds of ops. A new one does not compile until it is given a number here, and then fails until the test applies it.
const KINDS: usize = 31;

fn kind(op: &Op<'_>) -> usize {
    match op {
        Op::RegisterNode { .. } => 0,
        Op::MountSegment { .. } => 1,
        Op::UnmountSegment { .. } => 2,
        Op::SetContact { .. } => 3,
        Op::DropNode { .. } => 4,
        Op::OpenSession { .. } => 5,
        Op::ExpireSessions { .. } => 6,
        Op::PutStart(_) => 7,
        Op::PutEnd(_) => 8,
        Op::PutRevoke(_) => 9,
        Op::Remove(_) => 10,
        Op::Retire { .. } => 11,
        Op::Reclaim { .. } => 12,
        Op::Discard { .. } => 13,
        Op::FenceAcknowledged { .. } => 14,
        Op::DropReplica { .. } => 15,
        Op::SetConfig(_) => 16,
        Op::Checkpoint { .. } => 17,
        Op::RemoveObjects { .. } => 18,
        Op::SetPin { .. } => 19,
        Op::SetTenant { .. } => 20,
        Op::DropTenant { .. } => 21,
        Op::CopyStart(_) => 22,
        Op::CopyEnd { .. } => 23,
        Op::CreateTask(_) => 24,
        Op::EndTask { .. } => 25,
        Op::Audit => 26,
        Op::DropExtra { .. } => 27,
        Op::ClearReplicas(_) => 28,
        Op::BeginHistory { .. } => 30,
        Op::RaiseFeatureLevel { .. } => 29,
    }
}

/// A leader and a follower; every op applied to the one goes to the other as bytes.
struct Pair {
    leader: World,
    follower: Directory,
    sent: usize,
    kinds: BTreeSet<usize>,
}

impl Pair {
    /// Sends what was not sent yet and compares.
    fn compare(&mut self) {
        continue_with(&self.follower, &self.leader.log[self.sent..]);
        self.sent = self.leader.log.len();
        assert_eq!(self.follower.digest(), self.leader.directory.digest());
        assert_eq!(self.follower.applied(), self.leader.directory.applied());
    }

    /// Applies an op that must change the state.
    fn change(&mut self, op: Op<'_>) -> Outcome {
        let before = self.leader.directory.digest();
        self.kinds.insert(kind(&op));
        let outcome = self.leader.one(op.clone());
        assert!(!matches!(outcome, Outcome::Refused(_)), "{op:?}: {outcome:?}");
        assert_ne!(self.leader.directory.digest(), before, "{op:?} left no trace in the digest");
        self.compare();
        outcome
    }
}

impl Pair {
    /// Both audit what they have; nothing changes and nothing is found.
    fn audit(&mut self) {
        let before = self.leader.directory.digest();
        self.kinds.insert(kind(&Op::Audit));
        self.leader.audit();
        self.compare();
        assert_eq!(self.leader.directory.digest(), before);
        assert_eq!(self.follower.take_violations(), []);
        assert!(self.follower.audit_progress().passes >= 1);
    }
}

/// User report 2: replay existed, but the primary wrote nothing for some mutations.
#[test]
fn case_002_every_kind_of_mutation_reaches_a_follower() {
    let (leader, nodes, session) = World::with_nodes(3, 1 << 16);
    let mut pair = Pair { leader, follower: Directory::new(HISTORY), sent: 0, kinds: BTreeSet::new() };
    pair.compare();
    let (node, incarnation, segment) = nodes[0];

    pair.change(register(9, 9, "h9"));
    pair.change(Op::MountSegment { node, incarnation, name: "second", bytes: 4096 });
    pair.change(Op::OpenSession { client_uuid: [5; 16], host_id: "c" });
    pair.change(Op::SetContact { node: nodes[2].0, incarnation: nodes[2].1, contact: Contact::Suspect });
    let secret = Secret([3; 32]);
    pair.change(Op::SetConfig(Config { put_start_discard_timeout_ms: 1_000, secret, ..Config::default() }));

    let put = pair.leader.put_op(session, "whole", 100);
    let Outcome::Granted(whole) = pair.change(Op::PutStart(put)) else { panic!("not granted") };
    pair.change(Op::PutEnd(end(session, &whole, ReplicaEnd::Stored)));
    let revoked = pair.leader.start(session, "revoked", 100);
    pair.change(Op::PutRevoke(end(session, &revoked, ReplicaEnd::Unknown)));
    let owner = revoked.replicas[0];
    pair.change(Op::FenceAcknowledged {
        node: owner.node,
        incarnation: owner.incarnation,
        replicas: vec![owner.replica],
    });
    let stale = pair.leader.start(session, "stale", 100);
    pair.leader.time_ms += 2_000;
    pair.change(Op::Discard { objects: vec![stale.object] });
    let retired = pair.leader.put(session, "retired", 100);
    pair.change(Op::Retire { objects: vec![retired.object], mode: RetireMode::RetireOnly });
    pair.change(Op::Reclaim { replicas: vec![retired.replicas[0].replica] });
    let corrupt = pair.leader.put(session, "corrupt", 100);
    pair.change(Op::DropReplica { object: corrupt.object, replica: corrupt.replicas[0].replica });
    let pinned = pair.leader.put(session, "pinned", 100).object;
    pair.change(Op::SetPin { object: pinned, action: SoftPinAction::Enable { ttl_ms: 1_000 } });
    let upsert = PutStart { hard_pin: true, ..pair.leader.upsert_op(session, 0, "pinned", 50) };
    let Outcome::Granted(upsert) = pair.change(Op::PutStart(upsert)) else { panic!("not granted") };
    pair.change(Op::PutEnd(end(session, &upsert, ReplicaEnd::Stored)));
    // Only the turn of a removal that matched nothing is left of it.
    let turn = Turn { sequence: 9, floor: 0 };
    pair.change(Op::RemoveObjects { session, turn, objects: Vec::new(), mode: RetireMode::RetireOnly });
    let turn = Turn { sequence: 10, floor: 0 };
    let objects = vec![upsert.object];
    pair.change(Op::RemoveObjects { session, turn, objects, mode: RetireMode::RetireOnly });
    copies_and_tasks(&mut pair, whole.object);
    extra_and_cleared(&mut pair, session, whole.object);
    pair.change(Op::SetTenant { name: "t", quota: Quota::default() });
    pair.change(Op::SetTenant { name: "t", quota: Quota { refuse: true, ..Quota::default() } });
    pair.change(Op::DropTenant { name: "t" });
    pair.change(Op::Remove(remove(session, 1, 1, "whole")));
    pair.change(Op::ExpireSessions { sessions: vec![session] });
    pair.change(Op::Checkpoint { index: 1, digest: 2 });
    pair.change(Op::RaiseFeatureLevel { level: 2 });
    pair.change(Op::BeginHistory { before: (ClusterId([4; 16]), History(5)) });
    pair.audit();
    pair.change(Op::UnmountSegment { node, incarnation, segment });
    pair.change(Op::DropNode { node, incarnation });

    assert_eq!(
        pair.kinds.len(),
        KINDS,
        "kinds not tried: {:?}",
        (0..KINDS).collect::<BTreeSet<_>>().difference(&pair.kinds)
    );
    assert_eq!(pair.leader.directory.recompute_digest(), pair.leader.directory.digest());
}

/// An extra replica that goes, and one that is cleared, of which its turn is left when nothing was found.
fn extra_and_cleared(pair: &mut Pair, session: SessionId, object: ObjectId) {
    let task = TaskId(0);
    for cleared in [false, true] {
        let copy = CopyStart { object, instead_of: None, targets: Default::default(), task, up_to: 2 };
        let Outcome::CopyGranted(copy) = pair.change(Op::CopyStart(copy)) else { panic!("not granted") };
        pair.change(Op::CopyEnd { replica: copy.replica, end: ReplicaEnd::Stored });
        if cleared {
            for (sequence, replicas) in [(20, vec![]), (21, vec![copy.replica])] {
                let (turn, replicas) = (Turn { sequence, floor: 0 }, replicas.into());
                pair.change(Op::ClearReplicas(ClearReplicas { session, turn, object, replicas }));
            }
        } else {
            pair.change(Op::DropExtra { object, replica: copy.replica });
        }
    }
}

/// A copy and two moves, each with another end, and tasks.
fn copies_and_tasks(pair: &mut Pair, object: ObjectId) {
    let here = pair.leader.directory.with_object_id(object, |o| o.unwrap().replicas[0].segment);
    let create = CreateTask {
        kind: TaskKind::Drain,
        object: ObjectId(0),
        sources: vec![here],
        targets: Vec::new(),
        concurrency: 3,
        unmount: true,
        token: [1; 16],
    };
    let Outcome::TaskCreated { task } = pair.change(Op::CreateTask(create)) else { panic!("not created") };
    for end in [ReplicaEnd::Unknown, ReplicaEnd::Aborted, ReplicaEnd::Stored] {
        let source = pair.leader.directory.with_object_id(object, |o| o.unwrap().replicas[0].replica);
        let copy = CopyStart { object, instead_of: Some(source), targets: Default::default(), task, up_to: 0 };
        let Outcome::CopyGranted(copy) = pair.change(Op::CopyStart(copy)) else { panic!("not granted") };
        pair.change(Op::CopyEnd { replica: copy.replica, end });
    }
    pair.change(Op::EndTask { task, state: TaskState::Failed, left: 2, message: "no room" });
}
