//! openraft's conformance suite for storage.

use std::sync::Arc;

use futures::{Stream, TryStreamExt};
use openraft::entry::RaftEntry;
use openraft::storage::{EntryResponder, RaftSnapshotBuilder, RaftStateMachine, Snapshot};
use openraft::testing::log::{StoreBuilder, Suite};
use openraft::{OptionalSend, StorageError};

use super::*;
use crate::types::Config;
use crate::types::{CommittedLeaderId, Member, NodeId, SnapshotMeta, StoredMembership};

/// The least a state machine can be: the suite tests the log, and asks for one.
#[derive(Clone, Default)]
struct Machine(Arc<Mutex<MachineState>>);

#[derive(Default)]
struct MachineState {
    applied: Option<LogId>,
    membership: StoredMembership,
    snapshot: Option<SnapshotMeta>,
}

type MachineSnapshot = Snapshot<CommittedLeaderId, NodeId, Member, ()>;

impl<C: Config> RaftSnapshotBuilder<C> for Machine {
    type SnapshotData = ();
    async fn build_snapshot(&mut self) -> Result<MachineSnapshot, io::Error> {
        let mut state = self.0.lock();
        let meta = SnapshotMeta { last_log_id: state.applied, last_membership: state.membership.clone() };
        state.snapshot = Some(meta.clone());
        Ok(Snapshot { meta, snapshot: () })
    }
}

impl<C: Config> RaftStateMachine<C> for Machine {
    type SnapshotData = ();
    type SnapshotBuilder = Self;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, StoredMembership), io::Error> {
        let state = self.0.lock();
        Ok((state.applied, state.membership.clone()))
    }

    async fn apply<S>(&mut self, mut entries: S) -> Result<(), io::Error>
    where
        S: Stream<Item = Result<EntryResponder<C>, io::Error>> + Unpin + OptionalSend,
    {
        while let Some((entry, responder)) = entries.try_next().await? {
            {
                let mut state = self.0.lock();
                state.applied = Some(entry.log_id);
                if let Some(membership) = entry.get_membership() {
                    state.membership = StoredMembership::new(Some(entry.log_id), membership);
                }
            }
            if let Some(responder) = responder {
                responder.send(None);
            }
        }
        Ok(())
    }

    async fn get_snapshot_builder(&mut self) -> Self {
        self.clone()
    }

    async fn install_snapshot(&mut self, meta: &SnapshotMeta, _: ()) -> Result<(), io::Error> {
        let mut state = self.0.lock();
        state.applied = meta.last_log_id;
        state.membership = meta.last_membership.clone();
        state.snapshot = Some(meta.clone());
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<MachineSnapshot>, io::Error> {
        Ok(self.0.lock().snapshot.clone().map(|meta| Snapshot { meta, snapshot: () }))
    }
}

struct Simulated;

impl StoreBuilder<Sim, LogStore<Sim>, Machine> for Simulated {
    async fn build(&self) -> Result<((), LogStore<Sim>, Machine), StorageError<Sim>> {
        let (store, _) = open_sim(&SimulatedDisk::new(StoreId(1))).expect("opens");
        Ok(((), store, Machine::default()))
    }
}

#[test]
fn openraft_suite_passes_on_the_simulated_disk() {
    simulate(async { Suite::test_all(Simulated).await.expect("conforms") });
}

#[cfg(feature = "rocksdb")]
mod rocks {
    use super::*;
    use crate::types::TokioConfig;

    type Tokio = TokioConfig<()>;

    struct Rocks {
        cache_bytes: usize,
    }

    impl StoreBuilder<Tokio, LogStore<Tokio>, Machine, tempfile::TempDir> for Rocks {
        async fn build(&self) -> Result<(tempfile::TempDir, LogStore<Tokio>, Machine), StorageError<Tokio>> {
            let directory = tempfile::tempdir().expect("temporary directory");
            let (options, _) = options(Flushing::Thread, self.cache_bytes);
            let (store, _) = LogStore::open_rocks(directory.path(), options, &Registry::new()).expect("opens");
            Ok((directory, store, Machine::default()))
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn openraft_suite_passes_on_rocksdb() {
        Suite::test_all(Rocks { cache_bytes: 1 << 20 }).await.expect("conforms");
    }

    /// With no memory at all every read of a durable entry goes to the database.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn openraft_suite_passes_on_rocksdb_without_a_cache() {
        Suite::test_all(Rocks { cache_bytes: 0 }).await.expect("conforms");
    }
}
