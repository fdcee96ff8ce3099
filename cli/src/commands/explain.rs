//! `tidepool explain CODE`: the part of the book about one error code. The page is in the binary.

use tidepool_proto::ErrorCode;

use crate::exit::{Exit, Failed, code_name};
use crate::output;

/// The page of all codes.
pub const PAGE: &str = include_str!("../../../docs/reference/errors.md");

/// Prints what is known of a code: `TP0020`, `20`, `OBJECT_NOT_FOUND`, or Mooncake's `-704`.
pub fn run(wanted: &str) -> anyhow::Result<Exit> {
    let found = find(wanted);
    if found.is_empty() {
        let names = ErrorCode::ALL.iter().map(|code| code.name().to_owned());
        let near = crate::config::layers::closest(&wanted.to_ascii_uppercase(), names);
        return Err(Failed::usage(format!(
            "'{wanted}' is no error code; did you mean {near}? Codes read TP0020, OBJECT_NOT_FOUND or -704"
        )));
    }
    let parts: Vec<&str> = found.iter().filter_map(|code| section(*code)).collect();
    output::print(format!("{}\n", parts.join("\n\n")).as_bytes())?;
    Ok(Exit::Success)
}

fn find(wanted: &str) -> Vec<ErrorCode> {
    let upper = wanted.trim().to_ascii_uppercase();
    let number = upper.strip_prefix("TP").unwrap_or(&upper).parse::<i64>().ok();
    let matches = |code: &&ErrorCode| match number {
        Some(number) if number < 0 => i64::from(code.mooncake()) == number,
        Some(number) => i64::from(**code as u32) == number,
        None => code.name() == upper,
    };
    ErrorCode::ALL.iter().filter(matches).copied().collect()
}

/// The part of the page about one code, from its heading to the next.
fn section(code: ErrorCode) -> Option<&'static str> {
    let heading = format!("## {} {}", code_name(code), code.name());
    let start = PAGE.find(&format!("{heading}\n"))?;
    let body = &PAGE[start..];
    let end = body[3..].find("\n## ").map_or(body.len(), |at| at + 3);
    Some(body[..end].trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fails when a code is added without its part of the page, or its numbers there are wrong.
    #[test]
    fn every_error_code_has_its_part_of_the_page() {
        for &code in ErrorCode::ALL {
            let text = section(code).unwrap_or_else(|| {
                panic!("docs/reference/errors.md has no heading '## {} {}'", code_name(code), code.name())
            });
            let retry = if code.is_retryable() { "retry: yes" } else { "retry: no" };
            let facts = format!("Mooncake {}, {retry}", code.mooncake());
            assert!(text.contains(&facts), "{code:?}: the page must say '{facts}'");
            assert!(text.lines().count() >= 5, "{code:?}: say what it means and what to do");
        }
        let headings = PAGE.lines().filter(|line| line.starts_with("## TP")).count();
        assert_eq!(headings, ErrorCode::ALL.len(), "the page explains codes that do not exist");
    }

    #[test]
    fn codes_are_found_by_every_name() {
        for wanted in ["TP0020", "tp20", "20", "object_not_found", "-704"] {
            assert_eq!(find(wanted), [ErrorCode::ObjectNotFound], "{wanted}");
        }
        assert!(find("-600").len() > 1);
        assert!(find("nonsense").is_empty() && find("TP9999").is_empty());
    }
}
