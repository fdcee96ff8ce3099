//! What commands print: data to stdout as a table or as JSON, everything else to stderr.

use std::io::Write;

use serde_json::Value;

/// How data is printed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
pub enum Format {
    /// For people.
    #[default]
    Table,
    /// For programs: one JSON document.
    Json,
}

/// Columns and rows of text, aligned when printed.
#[derive(Clone, Debug, Default)]
pub struct Table {
    header: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these column names.
    pub fn new(header: &[&'static str]) -> Table {
        Table { header: header.to_vec(), rows: Vec::new() }
    }

    /// Adds a row; it must have as many cells as the header.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let cells: Vec<String> = cells.into_iter().collect();
        assert_eq!(cells.len(), self.header.len(), "a row has as many cells as its header");
        self.rows.push(cells);
    }

    /// True without rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Aligned text, every line indented by `indent`.
    pub fn render(&self, indent: usize) -> String {
        let width = |column: usize| {
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells.chain([self.header[column].len()]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.header.len()).map(width).collect();
        let mut text = String::new();
        let mut line = |cells: &[String]| {
            let mut one = " ".repeat(indent);
            for (cell, width) in cells.iter().zip(&widths) {
                one.push_str(&format!("{cell:<width$}  "));
            }
            text.push_str(one.trim_end());
            text.push('\n');
        };
        line(&self.header.iter().map(|name| name.to_ascii_uppercase()).collect::<Vec<_>>());
        self.rows.iter().for_each(|row| line(row));
        text
    }
}

/// Writes to stdout. A closed pipe (`| head`) ends the process quietly.
pub fn print(bytes: &[u8]) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        result => result.map_err(|error| anyhow::anyhow!("cannot write to stdout: {error}")),
    }
}

/// Prints one JSON document.
pub fn print_json(value: &Value) -> anyhow::Result<()> {
    print(format!("{value:#}\n").as_bytes())
}

/// What an object holds, as `--type` takes it but in capitals.
pub fn show_type(data_type: tidepool_client::DataType) -> &'static str {
    data_type.as_str_name().trim_start_matches("DATA_TYPE_")
}

/// Bytes as text where they are UTF-8, else escaped.
pub fn show_key(key: &[u8]) -> String {
    match std::str::from_utf8(key) {
        Ok(text) if !text.chars().any(char::is_control) => text.to_owned(),
        _ => key.escape_ascii().to_string(),
    }
}

/// `1 lease`, `2 leases`.
pub fn count(number: u64, noun: &str) -> String {
    if number == 1 { format!("1 {noun}") } else { format!("{number} {noun}s") }
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_align_and_keys_are_printable() {
        let mut table = Table::new(&["id", "address"]);
        table.row(["1".into(), "a:1".into()]);
        table.row(["22".into(), "b".into()]);
        assert_eq!(table.render(2), "  ID  ADDRESS\n  1   a:1\n  22  b\n");
        assert_eq!((count(1, "lease"), count(0, "lease")), ("1 lease".into(), "0 leases".into()));
        assert_eq!(show_key(b"plain/key"), "plain/key");
        assert_eq!(show_key(b"\xff\n"), "\\xff\\n");
    }
}
