//! The .proto files, read just far enough to fill every field of every message with a value that tells it from the others.

use std::collections::BTreeMap;
use std::path::Path;

/// Messages by name, in the order of the files.
pub struct Schema {
    order: Vec<String>,
    messages: BTreeMap<String, Vec<Field>>,
}

struct Field {
    number: u64,
    kind: String,
    repeated: bool,
    name: String,
    /// Place among the alternatives of the message's oneof.
    alternative: Option<usize>,
}

impl Schema {
    /// Reads the crate's own files.
    pub fn read() -> Schema {
        let mut schema = Schema { order: Vec::new(), messages: BTreeMap::new() };
        for name in ["types", "client", "node", "raft", "admin", "data"] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("proto/tidepool/v1/{name}.proto"));
            schema.read_file(&std::fs::read_to_string(path).unwrap());
        }
        schema
    }

    fn read_file(&mut self, text: &str) {
        let mut blocks: Vec<&str> = Vec::new();
        let mut alternatives = 0;
        for line in text.lines() {
            let line = line.split("//").next().unwrap().trim();
            let first = line.split(' ').next().unwrap();
            if let Some(rest) = line.strip_prefix("message ") {
                let name = rest.split([' ', '{']).next().unwrap();
                self.order.push(name.to_owned());
                self.messages.insert(name.to_owned(), Vec::new());
            }
            match (line.ends_with('{'), line) {
                (true, _) => {
                    alternatives = 0;
                    blocks.push(first);
                }
                (_, "}") => drop(blocks.pop()),
                _ if matches!(blocks.last(), Some(&("message" | "oneof"))) && line.ends_with(';') => {
                    let within = (*blocks.last().unwrap() == "oneof").then_some(alternatives);
                    alternatives += 1;
                    self.field(line, within);
                }
                _ => {}
            }
        }
    }

    fn field(&mut self, line: &str, alternative: Option<usize>) {
        let words: Vec<&str> = line.trim_end_matches(';').split(' ').filter(|word| !word.is_empty()).collect();
        let repeated = words[0] == "repeated";
        let labels = usize::from(repeated || words[0] == "optional");
        let [kind, name, "=", number] = words[labels..] else { return };
        let field = Field {
            number: number.parse().unwrap(),
            kind: kind.to_owned(),
            repeated,
            name: name.to_owned(),
            alternative,
        };
        let message = self.order.last().unwrap();
        self.messages.get_mut(message).unwrap().push(field);
    }

    /// Names of all messages.
    pub fn messages(&self) -> impl Iterator<Item = &str> {
        self.order.iter().map(String::as_str)
    }

    /// How many frames it takes to show a message: one an alternative of its oneof.
    pub fn cases(&self, message: &str) -> usize {
        self.messages[message].iter().filter_map(|field| field.alternative).max().map_or(1, |last| last + 1)
    }

    /// The message with every field set, and of its oneof this alternative.
    pub fn encode(&self, message: &str, case: usize) -> Vec<u8> {
        let mut out = Vec::new();
        let mut fields: Vec<&Field> = self.messages[message].iter().collect();
        fields.sort_by_key(|field| field.number);
        for field in fields.into_iter().filter(|field| field.alternative.is_none_or(|at| at == case)) {
            let values = 1 + u64::from(field.repeated);
            let numbers = (0..values).map(|at| field.number * 1_000 + at);
            match field.kind.as_str() {
                "fixed64" if field.repeated => {
                    let packed: Vec<u8> = numbers.flat_map(u64::to_le_bytes).collect();
                    bytes(&mut out, field.number, &packed);
                }
                "fixed64" => {
                    varint(&mut out, field.number << 3 | 1);
                    numbers.for_each(|value| out.extend_from_slice(&value.to_le_bytes()));
                }
                "string" | "bytes" => (0..values).for_each(|at| {
                    bytes(&mut out, field.number, format!("{}-{at}", field.name).as_bytes());
                }),
                kind if self.messages.contains_key(kind) => (0..values).for_each(|_| {
                    bytes(&mut out, field.number, &self.encode(kind, 0));
                }),
                kind => {
                    let numbers = numbers.map(|value| match kind {
                        "uint64" | "uint32" => value,
                        // Booleans, and the first alternative of an enum.
                        _ => 1,
                    });
                    if field.repeated {
                        let mut packed = Vec::new();
                        numbers.for_each(|value| varint(&mut packed, value));
                        bytes(&mut out, field.number, &packed);
                    } else {
                        varint(&mut out, field.number << 3);
                        numbers.for_each(|value| varint(&mut out, value));
                    }
                }
            }
        }
        out
    }
}

fn bytes(out: &mut Vec<u8>, number: u64, value: &[u8]) {
    varint(out, number << 3 | 2);
    varint(out, value.len() as u64);
    out.extend_from_slice(value);
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}
