//! One run: faults under load, healing, a deadline for everything to work again, the judgement.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use openraft::async_runtime::AsyncRuntime;
use openraft_rt_sim::SimRuntime;
use tidepool_proto::clock::BootInstant;
use tidepool_proto::plant::{Plant, plant};
use tidepool_proto::v1::admin_service_client::AdminServiceClient;
use tidepool_proto::{planted, v1};
use tidepool_raft::rt;
use tidepool_raft::sim::SplitMix;
use tidepool_raft::sim::surroundings::{On, SimMachine, simulate, spawn_on};

use crate::client::{CALL, Client};
use crate::history::{Call, History};
use crate::keys::{SMALL, group, tenant};
use crate::nemesis::{CLIENTS_FROM, DATANODES_FROM, Nemesis, masters, start_datanode};
use crate::net::{Channel, Net};
use crate::observe::Observer;
use crate::params::{Fault, Params};
use crate::provoke::provoke;
use crate::quorum::{DISCARD_AFTER, LEASE_MAX, MASTERS, Quorum, SUSPECT_AFTER, address};
use crate::trace::Trace;
use crate::{audit, checker};

/// Calls that must have ended while faults lasted, a client and second: a tenth of what half of all seeds do at least. Fewer, and the
/// run shows nothing.
pub const CALLS_FLOOR_PER_S: u64 = 1;
/// So often a seed begins with its faults anew that had fewer: some of them leave nobody who leads nearly all the time.
const AGAIN_MAX: u64 = 2;

/// How often a key is tried when everything works again. A put waits for room as long as a call may take; a pause lies between two
/// tries. Room is held by puts that nobody ends until they are discarded, and by leases: both are over before the second try is.
const TRIES: u32 = 2;
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(1);
const _: () = {
    let waits = 2 * CALL.as_millis() + TRY_AGAIN_AFTER.as_millis();
    assert!(waits > DISCARD_AFTER.as_millis() + LEASE_MAX.as_millis() * 105 / 100 + SUSPECT_AFTER.as_millis());
};

/// What a run came to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// Hash of all that happened.
    pub hash: u64,
    /// How much happened.
    pub events: u64,
    /// Calls that ended while faults lasted.
    pub calls_in_faults: u64,
    /// How long all clients together had for them, in milliseconds.
    pub clients_ms: u64,
    /// All calls whose end is known.
    pub calls: u64,
    /// Keys whose order was not found in time, neither right nor wrong.
    pub undecided: u64,
    /// Reads that were refused, or found other bytes, while their lease seemed to hold.
    pub outlived: u64,
    /// Faults by name.
    pub struck: BTreeMap<String, u64>,
}

/// Why a run is wrong.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The run.
    pub params: Params,
    /// What is wrong.
    pub what: String,
    /// Calls that contradict each other, as few as possible.
    pub calls: Vec<Call>,
    /// What happened, if it was recorded.
    pub lines: Vec<String>,
    /// Which guard was left out.
    pub planted: Option<Plant>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {}: {}", self.params.seed, self.what)?;
        writeln!(f, "  {:?}", self.params)?;
        for call in &self.calls {
            let ended = call.returned.map_or_else(|| "?".to_owned(), |at| format!("{:.6}", at as f64 / 1e9));
            let begun = call.invoked as f64 / 1e9;
            writeln!(f, "  {begun:.6}..{ended} client {} key {} {:?}", call.client, call.key, call.event)?;
        }
        let mut planted = self.planted.map_or_else(String::new, |plant| format!(" --plant {plant:?}"));
        if !self.params.clocks_agree() {
            planted.push_str(" --wild-clocks");
        }
        let seed = self.params.seed;
        write!(f, "replay: cargo run --release -p tidepool-sim -- --seeds {seed}..{} --trace{planted}", seed + 1)
    }
}

/// What else a run is asked.
#[derive(Clone, Copy, Default, Debug)]
pub struct Asked {
    /// Nothing goes wrong.
    pub calm: bool,
    /// Clocks differ by more than they may.
    pub wild_clocks: bool,
    /// Keep the lines of the trace.
    pub trace: bool,
    /// A guard that is left out.
    pub planted: Option<Plant>,
    /// The circumstances in which this guard matters, with the guard in place.
    pub provoked: Option<Plant>,
}

/// Runs one seed.
pub fn run(seed: u64, asked: Asked) -> Result<Report, Box<Failure>> {
    let mut params = match asked {
        Asked { calm: true, .. } => Params::calm(seed),
        Asked { wild_clocks: true, .. } => Params::wild_clocks(seed),
        _ => Params::of(seed),
    };
    if let Some(plant) = asked.planted.or(asked.provoked) {
        params = provoke(params, plant);
    }
    let trace = if asked.trace { Trace::verbose() } else { Trace::default() };
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
    let fail = |what: String, calls: Vec<Call>, trace: &Trace| {
        let lines = trace.lines();
        Box::new(Failure { params: params.clone(), what, calls, lines, planted: asked.planted })
    };
    let dir = dir.map_err(|error| fail(format!("no temporary directory: {error}"), Vec::new(), &trace))?;
    let mut runtime = SimRuntime::with_seed(seed);
    let simulation = simulate(seed);
    plant(asked.planted);
    let history = History::new(trace.clone());
    let prepared = Quorum::prepare(&params, dir.path());
    let net = Net::new(&params, prepared.0.world().clone(), trace.clone());
    let dial = net.clone();
    tidepool_master::sim::set_dial(Some(Arc::new(move |address, request| {
        let from = tidepool_raft::sim::surroundings::machine().map_or(0, |machine| machine.id);
        dial.exchange(from, &address.to_string(), request)
    })));
    let observer = Observer::new(&params, history.clone(), trace.clone());
    let watching = observer.clone();
    tidepool_master::sim::set_observer(Some(Arc::new(move |directory, index, ops| {
        let master = tidepool_raft::sim::surroundings::machine().map_or(0, |machine| machine.id);
        watching.applied(master, directory, index, ops);
    })));
    let skew = skew(&params);
    let quorum = Quorum::over(prepared, net.clone(), skew.clone());
    let outcome = runtime.block_on(life(&params, quorum, net, (history.clone(), observer), skew));
    drop(runtime);
    tidepool_master::sim::set_observer(None);
    tidepool_master::sim::set_dial(None);
    plant(None);
    drop(simulation);
    // What must not be counts before what did not come to be.
    if let Some(wrong) = history.all_wrong().first() {
        return Err(fail(format!("{:.6} {}", wrong.at as f64 / 1e9, wrong.what), Vec::new(), &trace));
    }
    let (violated, undecided) = checker::judge_all(&history.calls());
    if let Some((key, calls)) = violated {
        return Err(fail(format!("LINEARIZABLE: no order of the calls of key {key} explains them"), calls, &trace));
    }
    let (calls_in_faults, mut struck) = outcome.map_err(|what| fail(what, Vec::new(), &trace))?;
    let clients_ms = params.clients * params.faults_for.as_millis() as u64;
    let floor = floor(&params);
    if calls_in_faults < floor {
        let what = format!("{calls_in_faults} calls ended while faults lasted, {floor} must: the run shows nothing");
        return Err(fail(what, Vec::new(), &trace));
    }
    let calls = history.definite();
    let outlived = history.all_outlived();
    struck.insert("LeasesBroken".to_owned(), history.all_broken());
    Ok(Report {
        hash: trace.hash(),
        events: trace.events(),
        calls_in_faults,
        clients_ms,
        calls,
        undecided,
        outlived,
        struck,
    })
}

/// Calls that must have ended while faults lasted.
fn floor(params: &Params) -> u64 {
    CALLS_FLOOR_PER_S * params.clients * params.faults_for.as_millis() as u64 / 1_000
}

fn skew(params: &Params) -> BTreeMap<u64, i64> {
    let mut random = SplitMix::new(params.seed ^ 0x736b_6577);
    let ids = (1..=MASTERS)
        .chain((0..params.datanodes).map(|i| DATANODES_FROM + i))
        .chain((0..params.clients + params.readers).map(|i| CLIENTS_FROM + i));
    let spread = params.skew_ppm as u64;
    ids.map(|id| (id, random.range(0, 2 * spread) as i64 - params.skew_ppm)).collect()
}

async fn life(
    params: &Params,
    quorum: Quorum,
    net: Net,
    (history, observer): (History, Observer),
    skew: BTreeMap<u64, i64>,
) -> Result<(u64, BTreeMap<String, u64>), String> {
    for id in 1..=MASTERS {
        quorum.start(id).await?;
    }
    let mut datanodes = BTreeMap::new();
    for i in 0..params.datanodes {
        let id = DATANODES_FROM + i;
        datanodes.insert(id, start_datanode(id, &net, params, &skew)?);
    }
    audit::alive(&quorum, &datanodes.values().cloned().collect::<Vec<_>>()).await?;
    let began = quorum.leader().ok_or("nobody leads")?.node.identity();
    observer.begins(began.history.0);
    if params.special.quota_objects > 0 {
        set_quota(params, &net).await?;
    }
    let stop = Arc::new(AtomicBool::new(false));
    let mut clients = Vec::new();
    for i in 0..params.clients + params.readers {
        let machine = SimMachine::new(CLIENTS_FROM + i, skew[&(CLIENTS_FROM + i)], Duration::from_secs(7 * i));
        let mut client = client(&machine, &net, &history, params);
        client.stays = i >= params.clients;
        clients.push(work(machine, client, params.clone(), i, stop.clone()));
    }
    let mut nemesis = Nemesis::new(quorum.clone(), datanodes, net.clone(), params, skew, observer);
    let before = history.definite();
    nemesis.strike().await?;
    let mut calls_in_faults = history.definite() - before;
    for _ in 0..AGAIN_MAX {
        if calls_in_faults >= floor(params) || params.faults.is_empty() {
            break;
        }
        *nemesis.struck.entry("Again".to_owned()).or_default() += 1;
        nemesis.strike().await?;
        calls_in_faults = history.definite() - before;
    }
    nemesis.heal().await?;
    // What fell to a fault that is over is started again; whoever goes on falling is not alive.
    for _ in 0..30 {
        SimRuntime::sleep(Duration::from_millis(200)).await;
        nemesis.supervise().await?;
    }
    nemesis.complete_changes().await?;
    let datanodes: Vec<_> = nemesis.datanodes.values().cloned().collect();
    audit::alive(&quorum, &datanodes).await?;
    stop.store(true, Ordering::Relaxed);
    for client in clients {
        client.await.map_err(|_| "a client did not end".to_owned())?;
    }
    let tries = last_look(params, &net, &history).await?;
    audit::settled(&quorum, &datanodes).await?;
    if nemesis.observer.is_alone() {
        return Err("who went on alone never began its history".to_owned());
    }
    *nemesis.struck.entry("SecondTries".to_owned()).or_default() += tries;
    *nemesis.struck.entry("ForgottenKeys".to_owned()).or_default() += nemesis.observer.forgotten();
    Ok((calls_in_faults, nemesis.struck))
}

/// The tenant with a quota, registered by an operator.
async fn set_quota(params: &Params, net: &Net) -> Result<(), String> {
    let machine = SimMachine::new(CLIENTS_FROM + 91, 0, Duration::ZERO);
    let (net, from, keys) = (net.clone(), machine.id, params.special);
    let request = v1::SetTenantRequest {
        name: SMALL.to_owned(),
        quota_bytes: 0,
        quota_objects: keys.quota_objects,
        refuse_over_quota: keys.refuse,
    };
    let work = async move {
        for turn in 0..30 {
            let channel = Channel { net: net.clone(), from, address: address(1 + turn % MASTERS).to_string() };
            let set = AdminServiceClient::new(channel).set_tenant(request.clone()).await;
            if set.is_ok_and(|answer| answer.into_inner().error.is_none()) {
                return Ok(());
            }
            rt::sleep(Duration::from_millis(50)).await;
        }
        Err("nobody registers a tenant".to_owned())
    };
    On::new(machine, work).await
}

fn client(machine: &Arc<SimMachine>, net: &Net, history: &History, params: &Params) -> Client {
    let mut client = Client::new(machine.clone(), net.clone(), history.clone(), masters(params), params);
    client.bits_flip = params.faults.contains(&Fault::FlipBit);
    client
}

/// A client that calls until it is stopped.
fn work(
    machine: Arc<SimMachine>,
    mut client: Client,
    params: Params,
    number: u64,
    stop: Arc<AtomicBool>,
) -> tokio::sync::oneshot::Receiver<()> {
    let (done, ended) = tokio::sync::oneshot::channel();
    spawn_on(&machine, async move {
        let mut random = SplitMix::new(params.seed ^ number << 20 ^ 0x776f_726b);
        while !client.hello(BootInstant::now().after(CALL)).await && !stop.load(Ordering::Relaxed) {}
        while !stop.load(Ordering::Relaxed) {
            let key = random.below(params.keys);
            match random.below(100) {
                0..=49 if client.stays => drop(client.get(key).await),
                _ if client.stays => drop(client.exist(key).await),
                0..=28 => client.put(key, false).await,
                29..=38 => client.put(key, true).await,
                39..=66 => drop(client.get(key).await),
                67..=79 => drop(client.exist(key).await),
                80..=88 => client.remove(key, false).await,
                89..=92 => client.remove(key, true).await,
                93..=94 => client.remove_matching(key, random.chance(50)).await,
                95..=97 => client.list(params.keys).await,
                _ => client.pin(key).await,
            }
            let pause = Duration::from_millis(random.range(5, 40));
            rt::sleep(if planted!(IdleClients) { pause * 2_000 } else { pause }).await;
        }
        // The run may have ended.
        let _ended = done.send(());
    });
    ended
}

/// LISTED-IS-READABLE: with everything working, what is said to be there can be read, or is not said to be there any more.
async fn last_look(params: &Params, net: &Net, history: &History) -> Result<u64, String> {
    let machine = SimMachine::new(CLIENTS_FROM + 90, 0, Duration::ZERO);
    let mut client = client(&machine, net, history, params);
    client.calm();
    let (keys, special, history) = (params.keys, params.special, history.clone());
    let work = async move {
        if !client.hello(BootInstant::now().after(CALL)).await {
            return Err("LIVENESS: nobody says hello".to_owned());
        }
        for key in 0..keys {
            for turn in 0.. {
                match client.exist(key).await {
                    None => return Err(format!("LIVENESS: nobody says whether key {key} is there")),
                    Some(false) => break,
                    Some(true) => {}
                }
                if client.get(key).await.is_some() {
                    break;
                }
                if turn == 40 {
                    history.wrong(format!("LISTED-IS-READABLE: key {key} is said to be there and cannot be read"));
                    break;
                }
                rt::sleep(Duration::from_millis(100)).await;
            }
        }
        // What the tenant with a quota holds leaves no room for its other keys; and a put evicts nothing of the group that it joins, which
        // may fill the pool.
        let stands_in_the_way = |key: u64| !tenant(special, key).is_empty() || !group(special, key).is_empty();
        for key in (0..keys).filter(|&key| stands_in_the_way(key)) {
            client.remove(key, true).await;
        }
        let mut failed = 0;
        for key in 0..keys {
            // A key that takes nothing any more is as good as lost.
            for turn in 1..=TRIES {
                client.remove(key, true).await;
                client.put(key, false).await;
                if client.get(key).await == Some(true) {
                    break;
                }
                failed += 1;
                if turn == TRIES {
                    return Err(format!("LIVENESS: key {key} does not take a value and give it back"));
                }
                rt::sleep(TRY_AGAIN_AFTER).await;
            }
            if stands_in_the_way(key) {
                client.remove(key, true).await;
            }
        }
        Ok(failed)
    };
    On::new(machine, work).await
}
