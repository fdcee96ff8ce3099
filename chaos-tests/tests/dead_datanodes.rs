//! Datanodes that die or hang under readers: what is reported present can be read, and a dead node costs one slow call.

mod rig;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rig::{Pool, WITHIN, expect_all, keys, pool, put_all, wait_for};
use tidepool_chaos_tests::content::value_of;

const OBJECT_BYTES: usize = 64 << 10;
const CALL_WITHIN: Duration = Duration::from_secs(5);

/// Keys by the index of the datanode that holds their one copy.
async fn by_holder(pool: &Pool, keys: &[String]) -> BTreeMap<usize, Vec<String>> {
    let mut holders: BTreeMap<usize, Vec<String>> = BTreeMap::new();
    for (key, stat) in keys.iter().zip(pool.client.stat_many(keys, Some(WITHIN)).await) {
        let stat = stat.unwrap_or_else(|error| panic!("stat of {key}: {error}"));
        assert_eq!(stat.replicas.len(), 1, "{key}");
        let address = &stat.replicas[0].address;
        let at = pool.cluster.datanodes.iter().position(|node| node.rpc.to_string() == *address);
        holders.entry(at.unwrap_or_else(|| panic!("{key} is at {address}"))).or_default().push(key.clone());
    }
    holders
}

/// User report 50: the only holder of a key died; exist said yes for ten seconds and every get waited out its timeout.
/// Here the first failed get makes the node suspect for this client: its keys are no longer reported present, later gets
/// fail without waiting, the other node's keys are served. A false alarm (a node that only hung) heals by itself.
/// Fails when the client forgets who failed it: later gets then take their deadline each.
#[tokio::test(flavor = "multi_thread")]
async fn case_050_a_dead_holder_costs_one_slow_call_and_a_false_alarm_heals() {
    let mut pool = pool(|_| {}).await;
    let keys = keys("case-050", 60);
    put_all(&pool.client, &keys, OBJECT_BYTES, 1).await;
    expect_all(&pool.client, &keys, OBJECT_BYTES).await;
    let holders = by_holder(&pool, &keys).await;
    assert_eq!(holders.len(), 2, "the keys spread over both datanodes");
    let (lost, kept) = (&holders[&0], &holders[&1]);

    pool.cluster.datanodes[0].kill().unwrap();
    pool.client.get(&lost[0], Some(CALL_WITHIN)).await.expect_err("its only holder is dead");
    for (key, present) in lost.iter().zip(pool.client.exist_many(lost, Some(CALL_WITHIN)).await) {
        assert!(!present.unwrap(), "{key} is reported present; the one node that has it just failed this client");
    }
    let began = Instant::now();
    for key in lost {
        pool.client.get(key, Some(CALL_WITHIN)).await.expect_err("its only holder is dead");
    }
    assert!(began.elapsed() < CALL_WITHIN, "{} gets of a dead node's keys waited one after the other", lost.len());
    expect_all(&pool.client, kept, OBJECT_BYTES).await;

    // The other one only hangs. Its keys come back when it does.
    pool.cluster.datanodes[0].start().unwrap();
    pool.cluster.wait_serving(WITHIN).await.unwrap();
    pool.cluster.datanodes[1].process().unwrap().pause().unwrap();
    pool.client.get(&kept[0], Some(Duration::from_secs(1))).await.expect_err("its only holder hangs");
    pool.cluster.datanodes[1].process().unwrap().resume().unwrap();
    wait_for("the false alarm to heal", async || {
        pool.client.exist(&kept[0], Some(CALL_WITHIN)).await.unwrap_or(false).then_some(())
    })
    .await;
    pool.cluster.wait_serving(WITHIN).await.unwrap();
    expect_all(&pool.client, kept, OBJECT_BYTES).await;
}

/// User report 96: "in storage but can't be retrieved", until a redeploy. While datanodes die and come back under it,
/// whatever exist reports present is either read with its bytes, or not reported present again (LISTED-IS-READABLE).
/// Fails when exist ignores the reader's suspects.
#[tokio::test(flavor = "multi_thread")]
async fn case_096_what_exists_can_be_read_or_stops_existing() {
    let mut pool = pool(|_| {}).await;
    let (mut read, mut refused) = (0, 0);
    for round in 0..4 {
        let keys = keys(&format!("case-096/{round}"), 60);
        put_all(&pool.client, &keys, OBJECT_BYTES, 1).await;
        let victim = round % 2;
        for (at, key) in keys.iter().enumerate() {
            if at == 20 {
                pool.cluster.datanodes[victim].kill().unwrap();
            }
            if at == 50 {
                pool.cluster.datanodes[victim].start().unwrap();
            }
            if !pool.client.exist(key, Some(CALL_WITHIN)).await.unwrap() {
                refused += 1;
                continue;
            }
            match pool.client.get(key, Some(CALL_WITHIN)).await {
                Ok(value) => {
                    assert!(value == value_of(key, 0, OBJECT_BYTES), "{key} came back with other bytes");
                    read += 1;
                }
                Err(error) => {
                    let still = pool.client.exist(key, Some(CALL_WITHIN)).await.unwrap();
                    assert!(!still, "{key} exists, cannot be read ({error}), and exists again");
                    refused += 1;
                }
            }
        }
        pool.cluster.wait_serving(WITHIN).await.unwrap();
    }
    assert!(read > 0 && refused > 0, "{read} reads and {refused} refusals: the kills must be felt and must not be all");
}
