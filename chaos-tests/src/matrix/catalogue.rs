//! The faults, what must hold under each, and the names of the tests that show it.

/// One fault.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// F1 to F28.
    pub id: &'static str,
    /// What happens.
    pub fault: &'static str,
    /// What must hold.
    pub must_hold: &'static str,
    /// Tests with separate processes.
    pub process: &'static [&'static str],
    /// Tests on a simulated network, disk and clock.
    pub simulated: &'static [&'static str],
    /// Tests beside the code.
    pub unit: &'static [&'static str],
    /// What of it is not shown or does not hold; empty: nothing.
    pub open: &'static str,
}

const NONE: &[&str] = &[];

const fn row(id: &'static str, fault: &'static str, must_hold: &'static str, process: &'static [&'static str]) -> Row {
    Row { id, fault, must_hold, process, simulated: NONE, unit: NONE, open: "" }
}

impl Row {
    /// Whether it has a test that keeps what it found: those are named after their row.
    pub fn records(&self) -> bool {
        let number = self.id.trim_start_matches('F');
        self.process.iter().any(|name| name.starts_with(&format!("f{number:0>2}_")))
    }

    const fn simulated(self, simulated: &'static [&'static str]) -> Row {
        Row { simulated, ..self }
    }
    const fn unit(self, unit: &'static [&'static str]) -> Row {
        Row { unit, ..self }
    }
    const fn open(self, open: &'static str) -> Row {
        Row { open, ..self }
    }
}

/// All of them.
pub const CATALOGUE: &[Row] = &[
    row(
        "F1",
        "kill -9 of the leader under load",
        "no acknowledged put lost; writes back within a second; nothing applied twice",
        &["f01_a_killed_leader_loses_nothing", "case_001_every_acknowledged_object_survives_the_leader"],
    )
    .simulated(&["nothing_acknowledged_is_lost_whatever_fails"]),
    row(
        "F2",
        "kill -9 of a standby, of a majority, of all masters",
        "standby: no call fails or waits; majority: nothing is acknowledged; all: one state after the restart",
        &["f02_a_killed_standby_costs_nobody_a_call", "f02_without_a_majority_nothing_is_acknowledged"],
    ),
    row(
        "F3",
        "SIGSTOP of the leader for 30 ms to 2 s (30 s in the long run), then SIGCONT",
        "the woken leader answers nothing stale, nothing acknowledged is lost",
        &["f03_a_stopped_leader_that_wakes_harms_nothing", "case_010_a_stopped_leader_is_replaced_and_answers_nothing_stale_when_it_wakes"],
    ),
    row("F4", "SIGSTOP of a standby", "no election, no call fails or waits", &["f04_a_stopped_standby_is_not_missed"]),
    row(
        "F5",
        "the leader and a minority are cut off",
        "the minority acknowledges nothing and answers nothing stale; the majority goes on",
        &["f05_a_leader_in_the_minority_acknowledges_nothing"],
    )
    .simulated(&["a_leader_without_quorum_acknowledges_and_answers_nothing"]),
    row(
        "F6",
        "asymmetric cuts: the leader hears nobody, or nobody hears the leader",
        "writes go on, with the old leader or another",
        &["f06_a_leader_that_hears_nobody_steps_aside", "f06_a_leader_that_nobody_hears_is_replaced"],
    ),
    row(
        "F7",
        "two masters lose each other, the third hears both",
        "writes go on; at most one change of leader every 5 s",
        &["f07_a_bridge_does_not_make_leaders_flap"],
    ),
    row("F8", "a standby that was alone returns", "no change of leader, no failed call", &["f08_a_returning_standby_disturbs_nobody"])
        .simulated(&["an_isolated_follower_returns_without_an_election"]),
    row(
        "F9",
        "packets lost (5 %; 1 and 30 % in the long run), late (20 to 30 ms each way; up to 500 in the long run)",
        "every answer right; one leader while the delay is below half an election timeout",
        &["f09_a_lossy_link_gives_right_answers", "f09_a_late_link_keeps_its_leader"],
    ),
    row(
        "F10",
        "the wall clock jumps by an hour, forth and back; clock rates differ",
        "no election, no stale read, leases by the leader's time of office",
        &["f10_a_jump_of_the_wall_clock_changes_nothing"],
    )
    .unit(&["case_043_a_read_past_its_lease_is_right_bytes_or_lease_expired"])
    .open("other clock rates are not made with processes: masters and clients ask the kernel for CLOCK_BOOTTIME directly, which no library can intercept"),
    row("F11", "standbys restart within the leader's lease", "no stale read from the old leader", &["f11_standbys_that_restart_within_a_lease_cause_no_stale_read"])
        .simulated(&["a_deposed_leader_never_answers_a_stale_read", "without_the_fence_stale_reads_appear"]),
    row(
        "F12",
        "disk full",
        "the node ends and says why, the others go on; with space again it returns",
        &["f12_a_standby_whose_disk_is_full_ends_and_returns", "case_021_a_leader_whose_disk_is_full_steps_aside_and_loses_nothing"],
    ),
    row(
        "F13",
        "fsync fails",
        "the process ends, and never acknowledges after; it starts again from its log",
        &["f13_a_leader_whose_fsync_fails_ends_and_returns"],
    )
    .simulated(&["nothing_is_acknowledged_after_a_failed_sync"]),
    row(
        "F14",
        "fsync takes 200 ms longer, on a standby or the leader; a standby's is not answered; a leader with 3 % of a processor",
        "standby: no call fails or waits; leader: calls stay bounded, and it hands over to one whose disk is faster",
        &[
            "f14_a_slow_disk_of_a_standby_is_not_felt",
            "f14_a_slow_disk_of_the_leader_is_bounded",
            "f14_a_starved_leader_loses_nothing",
            "f14_a_disk_that_does_not_answer_is_told_of",
        ],
    )
    .simulated(&["a_leader_whose_disk_is_slow_hands_over_and_loses_nothing"]),
    row(
        "F15",
        "power cut of the leader's host, of all hosts",
        "everything acknowledged is there after a majority has booted",
        &[
            "f15_a_power_cut_loses_nothing_that_was_acknowledged",
            "f15_a_power_cut_of_the_leaders_host_is_survived",
            "f15_a_power_cut_finds_out_disks_that_lie",
        ],
    ),
    row("F16", "a write that is torn by the end of the process", "the log is cut off at the last whole entry; vote intact", &["f16_a_torn_write_is_cut_off"])
        .unit(&["a_torn_end_of_the_wal_is_cut_off_and_reported", "a_torn_tail_is_cut_off_and_reported"]),
    row(
        "F17",
        "a byte flips in the middle of the log on disk",
        "noticed when it is opened; the node does not serve, and another takes its place",
        &["f17_a_damaged_log_is_noticed_and_the_member_replaced"],
    ),
    row(
        "F18",
        "a snapshot or its manifest is damaged",
        "the older one is taken and more log; two snapshots are kept",
        &["a_standby_whose_snapshot_was_damaged_on_disk_comes_back_whole"],
    )
    .simulated(&["a_snapshot_that_does_not_load_is_as_good_as_damaged"]),
    row("F19", "a wiped node returns under its id", "refused, and told how to join", &["f19_a_wiped_standby_is_refused", "two_wiped_members_of_three_elect_nobody"])
        .simulated(&["a_wiped_member_is_refused_and_told_how_to_join", "two_wiped_members_of_three_are_refused_and_the_survivor_is_unharmed"]),
    row(
        "F20",
        "members change under load while the leader is killed",
        "the change completes; nothing lost; one leader",
        &["f20_a_member_joins_while_the_leader_dies", "f20_the_leader_dies_amid_the_joint_configuration", "case_019_a_crashed_master_is_removed_and_a_fourth_takes_its_place"],
    )
    .simulated(&["members_are_replaced_one_by_one_while_leaders_die_and_nothing_is_lost", "a_change_left_half_done_is_completed_by_the_next_leader"])
    .unit(&["case_018_fifty_joins_and_removals_with_forced_elections"]),
    row(
        "F21",
        "a rolling upgrade and the way back",
        "no failed call after retries; what is new waits for the feature level",
        &["a_loaded_quorum_rolls_to_the_new_binary_and_back (scripts/test --upgrade)"],
    )
    .simulated(&["a_member_takes_in_nothing_that_its_binary_cannot_apply"]),
    row("F22", "sender or receiver dies while a snapshot is sent", "it goes on or starts over; nothing half is installed", &["a_transfer_cut_at_its_begin_middle_or_end_leaves_a_whole_state", "a_standby_killed_at_any_moment_of_catching_up_has_a_whole_state_again"])
        .simulated(&["a_snapshot_that_is_cut_short_goes_on"]),
    row("F23", "a standby lags beyond what the log still has", "it comes back by snapshot, without a loop", &["f23_a_standby_beyond_the_log_comes_back_by_snapshot"])
        .simulated(&["a_purged_follower_returns_by_snapshot"]),
    row("F24", "a snapshot under load", "no election, no failed call", &["f24_a_snapshot_under_load_is_not_felt"]),
    row("F25", "memory ends", "the node is killed, the others go on; a clean restart", &["f25_a_standby_without_memory_returns"]),
    row("F26", "clients repeat requests across a failover", "each takes effect once", &["f01_a_killed_leader_loses_nothing"]).unit(&[
        "a_retry_with_the_same_token_gets_the_same_grant",
        "a_repeated_remove_answers_as_the_first_did_whatever_has_the_key_by_now",
        "a_late_duplicate_of_a_clear_leaves_the_newer_object",
    ]),
    row(
        "F27",
        "a datanode dies and returns while the leader dies",
        "right bytes or a miss; no space handed out twice",
        &[
            "f27_a_datanode_and_the_leader_die_together",
            "f27_a_datanode_that_hangs_and_one_that_flaps",
            "f27_a_datanode_that_returns_at_another_port",
            "f27_a_slow_datanode_holds_up_only_its_own",
        ],
    ),
    row("F28", "everything, mixed, for long", "one state, nothing lost, memory and descriptors flat", &["f28_a_short_soak (scripts/test --soak MINUTES for a long one)"]),
];
