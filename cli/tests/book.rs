//! The book: every page is listed, every link leads somewhere, and what it names exists.

use std::collections::BTreeSet;
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
