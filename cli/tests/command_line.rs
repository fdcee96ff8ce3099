//! The command line without any server: help, configuration, exit codes.

mod binary;

use binary::{code, expect, run, text, tidepool};

/// User report 105: people ask for a redis-cli. Each is one command.
#[test]
fn case_105_every_command_exists_and_explains_itself() {
    let help = expect(&["--help"]);
    let commands = [
        "dev",
        "master",
        "datanode",
        "put",
        "get",
        "rm",
        "ls",
        "stat",
        "status",
        "transfer-leader",
        "bench",
        "drill",
        "doctor",
        "config",
        "completion",
        "explain",
    ];
    for command in commands {
        assert!(
            help.lines().any(|line| line.trim_start().starts_with(&format!("{command} "))),
            "{command} is not in\n{help}"
        );
        let own = expect(&[command, "--help"]);
        assert!(own.contains("Usage: tidepool"), "{own}");
    }
    assert!(expect(&["stat", "--help"]).contains("--where"));
    assert!(expect(&["drill", "--help"]).contains("kill-leader"));
    assert!(!help.contains("load-worker"), "hidden commands are hidden");
}

#[test]
fn the_books_table_of_commands_is_complete() {
    let page = include_str!("../../docs/reference/cli.md");
    let help = expect(&["--help"]);
    let listed =
        help.lines().skip_while(|line| !line.starts_with("Commands:")).skip(1).take_while(|line| !line.is_empty());
    for line in listed {
        let name = line.split_whitespace().next().expect("a command");
        assert!(
            name == "help" || page.contains(&format!("`tidepool {name}")),
            "docs/reference/cli.md does not list {name}"
        );
    }
}

#[test]
fn config_show_prints_every_value_with_its_origin() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("t.toml");
    std::fs::write(&file, "[master]\nnode_id = 3\n").unwrap();
    let file = file.to_str().unwrap();
    let output = tidepool()
        .args(["config", "show", "-o", "json", "--config", file, "--masters", "a,b"])
        .env("TIDEPOOL_DATANODE_DRAM", "2GiB")
        .output()
        .unwrap();
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(shown["master.node_id"]["value"], "3");
    assert_eq!(shown["master.node_id"]["origin"], format!("file {file}"));
    assert_eq!(shown["datanode.dram"]["origin"], "environment TIDEPOOL_DATANODE_DRAM");
    assert_eq!(shown["masters"]["origin"], "flag --masters");
    assert_eq!(shown["deadline"]["origin"], "default");
    assert!(expect(&["config", "show"]).contains("master.listen"));
}

#[test]
fn wrong_usage_and_wrong_configuration_are_exit_code_2() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("t.toml");
    std::fs::write(&file, "[master]\nlisen = 'x'\n").unwrap();
    let file = file.to_str().unwrap();
    for (arguments, wanted) in [
        (vec!["no-such-command"], "no-such-command"),
        (vec!["status", "--deadline", "10"], "with its unit"),
        (vec!["status", "--masters", "etcd://a:2379"], "own quorum"),
        (vec!["status", "--config", "/nonexistent.toml"], "cannot read"),
        (vec!["status", "--config", file], "did you mean 'master.listen'"),
        (vec!["explain", "OBJECT_NOT_FUND"], "OBJECT_NOT_FOUND"),
        (vec!["master", "--listen", "0.0.0.0"], "--advertise"),
        (vec!["master", "--members", "1=10.0.0.1,2=10.0.0.2", "--listen", "127.0.0.1"], "--listen"),
        (vec!["datanode", "--masters", "10.0.0.1"], "--advertise"),
        (vec!["master", "--log-filter", "a=b=c"], "log filter"),
    ] {
        let output = run(&arguments);
        assert_eq!(code(&output), 2, "{arguments:?}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains(wanted), "{arguments:?}: {}", text(&output.stderr));
        assert!(output.stdout.is_empty(), "errors go to stderr");
    }
}

#[test]
fn without_a_quorum_the_exit_code_says_try_later() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = listener.local_addr().unwrap().to_string();
    drop(listener);
    for arguments in [
        vec!["status", "--masters", &silent, "--deadline", "500ms"],
        vec!["get", "k", "--masters", &silent, "--deadline", "500ms"],
        vec!["transfer-leader", "--masters", &silent, "--deadline", "500ms"],
    ] {
        let output = run(&arguments);
        assert_eq!(code(&output), 5, "{arguments:?}: {}", text(&output.stderr));
    }
    let output = run(&["status", "--masters", &silent, "--deadline", "500ms", "-o", "json"]);
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(shown["next_step"].as_str().unwrap().contains("no master answers"), "{shown}");
    assert_eq!(shown["masters"][0]["reachable"], false);
}

#[test]
fn codes_are_explained_and_completions_are_scripts() {
    assert!(expect(&["explain", "-704"]).contains("TP0020 OBJECT_NOT_FOUND"));
    assert!(expect(&["explain", "tp0029"]).contains("What to do"));
    for shell in ["bash", "zsh", "fish"] {
        assert!(expect(&["completion", shell]).contains("transfer-leader"), "{shell}");
    }
    assert!(expect(&["config", "reference"]).starts_with("# Configuration reference"));
}
