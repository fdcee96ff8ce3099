//! What arrives and does not load.

use super::*;
use crate::metrics::NodeMetrics;
use crate::options::Agreement;
use crate::types::log_id;

struct LoadsNothing;

impl StateMachine for LoadsNothing {
    type Outcome = ();
    fn apply(&self, _at: LogPosition, _payload: &[u8]) -> Result<(), MachineError> {
        Ok(())
    }
    fn skip(&self, _at: LogPosition) {}
    fn applied(&self) -> Option<LogPosition> {
        None
    }
    fn freeze(&self) -> Box<dyn Frozen> {
        Box::new(Words)
    }
    fn install(&self, _at: LogPosition, _input: &mut dyn io::Read) -> Result<(), MachineError> {
        Err(MachineError::new("it does not load"))
    }
}

struct Words;

impl Frozen for Words {
    fn write_to(self: Box<Self>, out: &mut dyn io::Write) -> io::Result<()> {
        out.write_all(b"words")
    }
}

/// One that arrived whole and does not load never becomes what a restart finds. Fails when it is adopted before it is loaded (tried).
#[test]
fn what_does_not_load_is_not_kept() {
    let [own, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let store = |dir: &tempfile::TempDir| SnapshotStore::open(dir.path(), Agreement::Majority).unwrap();
    let meta = SnapshotMeta { last_log_id: Some(log_id(1, 9)), ..Default::default() };
    let arrived = store(&other).write(&meta, Box::new(Words)).unwrap();
    let metrics = NodeMetrics::new(prometheus::Registry::new()).unwrap();
    let (failure, skips) = (Arc::new(Failure::new()), (own.path().to_owned(), Skips::default()));
    let applied = Applied::new(Arc::new(LoadsNothing), store(&own), failure, metrics.apply_held.clone(), skips);
    applied.install(arrived).unwrap_err();
    assert!(applied.snapshots.current().is_none());
    assert!(store(&own).current().is_none());
}
