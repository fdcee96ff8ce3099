//! The trace format of Mooncake, "Trading more storage for less computation", FAST '25: one JSON object a line.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use anyhow::Context;
use serde::Deserialize;

/// Requests, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// Each one's prefix blocks: equal ids are equal contents after equal contents.
    pub requests: Vec<Vec<u64>>,
}

/// One line. What a replay of blocks does not use must still be there.
#[derive(Deserialize)]
struct Line {
    /// Milliseconds since the first request.
    #[serde(rename = "timestamp")]
    _timestamp: f64,
    /// Tokens of the prompt.
    #[serde(rename = "input_length")]
    _input_length: u64,
    /// Tokens of the answer.
    #[serde(rename = "output_length")]
    _output_length: u64,
    hash_ids: Vec<u64>,
}

/// Reads a whole trace. Errors name the file, the line and what is wrong with it.
pub fn read(path: &Path) -> anyhow::Result<Trace> {
    let file = File::open(path).with_context(|| format!("cannot open trace {}", path.display()))?;
    parse(BufReader::new(file), &path.display().to_string())
}

fn parse(lines: impl BufRead, name: &str) -> anyhow::Result<Trace> {
    let mut trace = Trace::default();
    for (i, line) in lines.lines().enumerate() {
        let number = i + 1;
        let line = line.with_context(|| format!("{name}:{number}: cannot read"))?;
        if line.trim().is_empty() {
            continue;
        }
        let line: Line = serde_json::from_str(&line)
            .map_err(|error| anyhow::anyhow!("{name}:{number}: {}", reason(&error, &line)))?;
        trace.requests.push(line.hash_ids);
    }
    anyhow::ensure!(!trace.requests.is_empty(), "{name}: no request in it");
    Ok(trace)
}

/// What is wrong, without the line number that is always 1.
fn reason(error: &serde_json::Error, line: &str) -> String {
    let text = error.to_string();
    let text = text.split(" at line ").next().unwrap_or_default();
    if error.is_data() {
        let is_value = text.starts_with("invalid type") || text.starts_with("invalid value");
        let of = if is_value { field_before(line, error.column()) } else { None };
        return match of {
            Some("hash_ids") => format!("a hash id is not a whole number from 0: {text}"),
            Some(field) => format!("field {field}: {text}"),
            None => text.to_owned(),
        };
    }
    format!("not JSON: {text} at column {}", error.column())
}

/// Name of the last field that begins before a column.
fn field_before(line: &str, column: usize) -> Option<&'static str> {
    const FIELDS: [&str; 4] = ["timestamp", "input_length", "output_length", "hash_ids"];
    let before = line.get(..column)?;
    FIELDS.into_iter().filter_map(|field| Some((before.rfind(&format!("\"{field}\""))?, field))).max().map(|(_, f)| f)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        parse(text.as_bytes(), "t.jsonl").expect_err("must be refused").to_string()
    }

    #[test]
    fn reads_blocks_in_order_and_skips_empty_lines() {
        let text = "{\"timestamp\": 0, \"input_length\": 1000, \"output_length\": 5, \"hash_ids\": [0, 7]}\n\n\
                    {\"timestamp\": 1.5, \"input_length\": 500, \"output_length\": 5, \"hash_ids\": [], \"more\": 1}\n";
        let trace = parse(text.as_bytes(), "t.jsonl").expect("a trace");
        assert_eq!(trace.requests, vec![vec![0, 7], vec![]]);
    }

    #[test]
    fn errors_name_file_line_and_what_is_wrong() {
        let good = "{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 5, \"hash_ids\": [0]}\n";
        let cases = [
            ("{\"timestamp\": 0,", "t.jsonl:2: not JSON: EOF while parsing"),
            ("{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 5}", "t.jsonl:2: missing field `hash_ids`"),
            (
                "{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 5, \"hash_ids\": [0, \"a\"]}",
                "t.jsonl:2: a hash id is not a whole number from 0: invalid type: string \"a\"",
            ),
            (
                "{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 5, \"hash_ids\": [-4]}",
                "t.jsonl:2: a hash id is not a whole number from 0: invalid value: integer `-4`",
            ),
            (
                "{\"timestamp\": \"x\", \"input_length\": 1, \"output_length\": 5, \"hash_ids\": [0]}",
                "t.jsonl:2: field timestamp: invalid type: string \"x\"",
            ),
        ];
        for (line, wanted) in cases {
            let found = error(&format!("{good}{line}\n"));
            assert!(found.starts_with(wanted), "{found}");
        }
        assert_eq!(error("\n"), "t.jsonl: no request in it");
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = read(Path::new("/nowhere/t.jsonl")).expect_err("no such file");
        assert_eq!(error.to_string(), "cannot open trace /nowhere/t.jsonl");
    }
}
