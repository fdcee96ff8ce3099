//! The book: every page is listed, every link leads somewhere, and what it names exists.

mod binary;

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_owned()
}

fn pages() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![root().join("docs")];
    while let Some(directory) = open.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// Targets of `[text](target)` outside code.
fn links(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut in_code = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        if in_code {
            continue;
        }
        let mut rest = line;
        while let Some(at) = rest.find("](") {
            rest = &rest[at + 2..];
            if let Some(end) = rest.find(')') {
                found.push(rest[..end].to_owned());
                rest = &rest[end..];
            }
        }
    }
    found
}

/// Headings as anchors, the way mdBook makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let heading = |line: &str| {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        title
            .chars()
            .filter(|c| c.is_alphanumeric() || *c == ' ' || *c == '-' || *c == '_')
            .collect::<String>()
            .replace(' ', "-")
    };
    text.lines().filter(|line| line.starts_with('#')).map(heading).collect()
}

#[test]
fn every_link_leads_somewhere() {
    let mut broken = Vec::new();
    for page in pages().into_iter().chain([root().join("README.md"), root().join("CHANGELOG.md")]) {
        let text = std::fs::read_to_string(&page).unwrap();
        for link in links(&text).into_iter().filter(|link| !link.contains("://")) {
            let (file, anchor) =
                link.split_once('#').map_or((link.as_str(), None), |(file, anchor)| (file, Some(anchor)));
            let target = if file.is_empty() { page.clone() } else { page.parent().unwrap().join(file) };
            let lost = match (std::fs::read_to_string(&target), anchor) {
                (Err(_), _) => !target.exists(),
                (Ok(text), Some(anchor)) => !anchors(&text).contains(anchor),
                (Ok(_), None) => false,
            };
            if lost {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "broken links:\n{}", broken.join("\n"));
}

#[test]
fn every_page_is_in_the_summary() {
    let docs = root().join("docs");
    let summary = std::fs::read_to_string(docs.join("SUMMARY.md")).unwrap();
    let listed: BTreeSet<PathBuf> = links(&summary).into_iter().map(|link| docs.join(link)).collect();
    for page in pages().into_iter().filter(|page| page.file_name().unwrap() != "SUMMARY.md") {
        assert!(listed.contains(&page), "{} is not in docs/SUMMARY.md", page.display());
    }
}

/// The commands of a page's shell blocks, without comments and continuations, one a row; blocks one by one.
fn shell_blocks(text: &str) -> Vec<Vec<String>> {
    let mut blocks = Vec::new();
    let mut open: Option<Vec<String>> = None;
    let mut continues = false;
    for line in text.lines() {
        match (&mut open, line.trim()) {
            (None, "```sh") => open = Some(Vec::new()),
            (Some(_), "```") => blocks.extend(open.take()),
            (Some(block), line) => {
                let command = line.split(" #").next().unwrap_or_default().trim();
                let (command, more) = command.strip_suffix('\\').map_or((command, false), |part| (part.trim(), true));
                match block.last_mut() {
                    Some(last) if continues => last.push_str(&format!(" {command}")),
                    _ if command.is_empty() || command.starts_with('#') => {}
                    _ => block.push(command.to_owned()),
                }
                continues = more;
            }
            (None, _) => {}
        }
    }
    blocks
}

/// User report 91: the documented build steps failed. The README's steps are the two scripts that CI runs, each of which
/// installs what it needs first. Fails when the README names another step, or a script forgets the installation (both
/// tried).
#[test]
fn case_091_the_readmes_steps_are_what_ci_runs() {
    let read = |path: &str| std::fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
    let steps = shell_blocks(&read("README.md")).remove(0);
    assert_eq!(steps, ["./scripts/demo", "./scripts/test"]);
    for script in ["scripts/demo", "scripts/test", "scripts/setup", ".ci/run"] {
        let mode = std::fs::metadata(root().join(script)).unwrap().permissions().mode();
        assert_eq!(mode & 0o111, 0o111, "{script} is not executable");
    }
    let calls = |script: &str, other: &str| {
        let text = read(script);
        text.lines().any(|line| !line.starts_with('#') && line.split([' ', ';']).any(|word| word == other))
    };
    for script in ["scripts/demo", "scripts/test"] {
        assert!(calls(script, "scripts/setup"), "{script} does not install what it needs: it must call scripts/setup");
    }
    assert!(calls(".ci/run", "scripts/test"), ".ci/run does not run what the README says");
    assert!(calls("scripts/test", "scripts/demo"), "scripts/test does not run the demo");
}

/// Every command line that the README and the book show names a command and flags that exist. (Tried with `--ram`: fails.)
#[test]
fn case_091_every_command_the_book_shows_exists() {
    let mut seen = 0;
    for page in pages().into_iter().chain([root().join("README.md")]) {
        let text = std::fs::read_to_string(&page).unwrap();
        for line in shell_blocks(&text).concat() {
            for command in line.split("&&").flat_map(|part| part.split('|')).map(str::trim) {
                let words: Vec<&str> = command.split_whitespace().collect();
                match words.first() {
                    Some(&"tidepool") => {}
                    Some(first) if first.starts_with("./") => {
                        assert!(root().join(first).exists(), "{}: {first} does not exist", page.display());
                        continue;
                    }
                    _ => continue,
                }
                let nested = matches!(
                    words.get(1),
                    Some(&("drill" | "config" | "member" | "snapshot" | "task" | "tenant" | "feature-level"))
                );
                let names = if nested { &words[1..3] } else { &words[1..2] };
                let help = binary::expect(&[names, &["--help"]].concat());
                // What stands in quotes is another program's.
                let own: String = command.split('\'').step_by(2).collect();
                for flag in own.split_whitespace().filter(|word| word.starts_with("--")) {
                    assert!(help.contains(flag), "{}: '{command}': {names:?} has no {flag}", page.display());
                }
                seen += 1;
            }
        }
    }
    assert!(seen > 10, "only {seen} commands were found");
}

/// A roadmap that names a test names one that exists.
#[test]
fn the_roadmap_names_tests_that_exist() {
    let roadmap = std::fs::read_to_string(root().join("docs/internals/roadmap.md")).unwrap();
    let mut sources = String::new();
    for part in ["proto", "raft", "master", "transport", "datanode", "client", "cli", "chaos-tests"] {
        read_sources(&root().join(part), &mut sources);
    }
    let word = |c: char| !(c.is_ascii_alphanumeric() || c == '_');
    for name in roadmap.split(word).filter(|name| name.starts_with("case_") && name.len() > 9) {
        assert!(sources.contains(&format!("fn {name}")), "docs/internals/roadmap.md names {name}, which is no test");
    }
}

fn read_sources(directory: &Path, into: &mut String) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            read_sources(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push_str(&std::fs::read_to_string(&path).unwrap());
        }
    }
}
