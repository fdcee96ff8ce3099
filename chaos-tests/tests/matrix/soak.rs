//! F28: all faults mixed, for a short while.

use tidepool_chaos_tests::matrix;
use tidepool_chaos_tests::soak::{SoakOptions, run};

use crate::rig::binary;

/// `scripts/test --soak MINUTES` runs it for long.
#[test]
fn f28_a_short_soak() {
    match run(SoakOptions { seconds: 12, seed: None }, &binary()) {
        Ok(Ok(findings)) => matrix::record("F28", &findings).unwrap(),
        Ok(Err(error)) => panic!("{error:#}"),
        Err(refused) => {
            eprintln!("skipped: {refused}");
            matrix::record_not_here("F28", &refused.0).unwrap();
        }
    }
}
