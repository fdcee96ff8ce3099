//! Layers: defaults, then the TOML file, then the environment, then flags. Each value remembers where it came from.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use tidepool_proto::Address;

use super::setting::{Alias, SETTINGS, Setting, Unit};
use super::value::{MemberAddress, Typed};

/// Where a value came from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Origin {
    /// The table of settings.
    Default,
    /// The configuration file.
    File(PathBuf),
    /// An environment variable.
    Environment(String),
    /// A flag of the command line.
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::File(path) => write!(f, "file {}", path.display()),
            Origin::Environment(name) => write!(f, "environment {name}"),
            Origin::Flag(name) => write!(f, "flag --{name}"),
        }
    }
}

/// One setting's value.
#[derive(Clone, Debug)]
pub struct Value {
    /// As written; empty when unset.
    pub text: String,
    /// Checked; None when unset.
    pub typed: Option<Typed>,
    /// Where it came from.
    pub origin: Origin,
}

/// What the layers are read from. Tests fill it by hand; the binary from the process.
#[derive(Clone, Debug, Default)]
pub struct Layers {
    /// `--config`, or TIDEPOOL_CONFIG.
    pub file: Option<PathBuf>,
    /// Every environment variable.
    pub environment: Vec<(String, String)>,
    /// Flags that were given: setting path, flag name, alias unit, text.
    pub flags: Vec<FlagValue>,
}

/// A flag that was given.
#[derive(Clone, Debug)]
pub struct FlagValue {
    /// Path of the setting.
    pub path: String,
    /// Name as typed, without dashes.
    pub flag: String,
    /// How the text reads.
    pub unit: Unit,
    /// The text.
    pub text: String,
}

#[cfg(test)]
impl FlagValue {
    /// `--setting-name text`.
    pub fn own(path: &str, text: &str) -> FlagValue {
        let name = path.rsplit('.').next().unwrap_or(path);
        FlagValue { path: path.into(), flag: name.replace('_', "-"), unit: Unit::Own, text: text.into() }
    }
}

#[cfg(test)]
impl Config {
    /// Nothing but these flags.
    pub fn of_flags(flags: &[(&str, &str)]) -> anyhow::Result<Config> {
        let flags = flags.iter().map(|(path, text)| FlagValue::own(path, text)).collect();
        Layers { flags, ..Layers::default() }.resolve()
    }
}

/// The resolved configuration.
#[derive(Clone, Debug)]
pub struct Config {
    values: BTreeMap<String, Value>,
    warnings: Vec<String>,
}

/// Environment variables with our prefix that are no settings.
const OTHER_ENVIRONMENT: &[&str] = &["TIDEPOOL_CONFIG", "TIDEPOOL_CACHE"];

impl Layers {
    /// Resolves every setting. Errors name the origin, the key and what is accepted.
    pub fn resolve(&self) -> anyhow::Result<Config> {
        let mut config = Config { values: BTreeMap::new(), warnings: Vec::new() };
        for setting in SETTINGS {
            config.set(setting, setting.default, Origin::Default)?;
        }
        if let Some(path) = &self.file {
            config.read_file(path)?;
        }
        config.read_environment(&self.environment)?;
        for given in &self.flags {
            let setting = Setting::find(&given.path).with_context(|| format!("no setting {}", given.path))?;
            config.set_foreign(setting, given.unit, &given.text, Origin::Flag(given.flag.clone()))?;
        }
        Ok(config)
    }
}

impl Config {
    fn set(&mut self, setting: &Setting, text: &str, origin: Origin) -> anyhow::Result<()> {
        let typed = match text {
            "" => None,
            text => Some(
                setting
                    .kind
                    .parse(text)
                    .map_err(|why| anyhow::anyhow!("{} = '{text}' ({origin}): {why}", setting.path()))?,
            ),
        };
        self.values.insert(setting.path(), Value { text: text.to_owned(), typed, origin });
        Ok(())
    }

    fn set_foreign(&mut self, setting: &Setting, unit: Unit, text: &str, origin: Origin) -> anyhow::Result<()> {
        let text = text.trim();
        let bare = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let translated = match unit {
            Unit::Own => text.to_owned(),
            Unit::Milliseconds if bare => format!("{text}ms"),
            Unit::Seconds if bare => format!("{text}s"),
            Unit::Milliseconds | Unit::Seconds => text.to_owned(),
            Unit::LooseSize => loose_size(text),
            Unit::Port => match text.parse::<u16>() {
                Ok(port) => self.address_of(setting)?.with_port(port).to_string(),
                Err(_) => bail!("{} = '{text}' ({origin}): expected a port", setting.path()),
            },
        };
        self.set(setting, &translated, origin)
    }

    fn address_of(&self, setting: &Setting) -> anyhow::Result<Address> {
        match self.values.get(&setting.path()).and_then(|value| value.typed.as_ref()) {
            Some(Typed::Address(address)) => Ok(address.clone()),
            _ => Ok(Address::new("127.0.0.1", 0)?),
        }
    }

    fn read_file(&mut self, path: &Path) -> anyhow::Result<()> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the configuration {}", path.display()))?;
        let table: toml::Table =
            text.parse().map_err(|error| anyhow::anyhow!("{} is not valid TOML: {error}", path.display()))?;
        for (key, value) in &table {
            match value {
                toml::Value::Table(section) => {
                    for (name, value) in section {
                        self.set_from_file(path, &format!("{key}.{name}"), value)?;
                    }
                    if section.is_empty() && !super::Section::ALL.iter().any(|known| known.name() == key) {
                        bail!("{}: unknown table [{key}]; known tables are [master] and [datanode]", path.display());
                    }
                }
                value => self.set_from_file(path, key, value)?,
            }
        }
        Ok(())
    }

    fn set_from_file(&mut self, path: &Path, key: &str, value: &toml::Value) -> anyhow::Result<()> {
        let Some(setting) = Setting::find(key) else {
            bail!("{}: unknown key '{key}'; did you mean '{}'?", path.display(), nearest(key));
        };
        let text = match value {
            toml::Value::String(text) => text.clone(),
            toml::Value::Integer(number) => number.to_string(),
            toml::Value::Boolean(yes) => yes.to_string(),
            toml::Value::Array(items) if items.iter().all(toml::Value::is_str) => {
                items.iter().filter_map(toml::Value::as_str).collect::<Vec<_>>().join(",")
            }
            other => bail!("{}: {key}: expected {}, found a {}", path.display(), setting.kind, other.type_str()),
        };
        self.set(setting, &text, Origin::File(path.to_owned()))
    }

    fn read_environment(&mut self, environment: &[(String, String)]) -> anyhow::Result<()> {
        let lookup = |name: &str| environment.iter().find(|(given, _)| given == name).map(|(_, text)| text.as_str());
        for setting in SETTINGS {
            for Alias { name, unit } in setting.environment {
                if let Some(text) = lookup(name) {
                    self.set_foreign(setting, *unit, text, Origin::Environment((*name).to_owned()))?;
                }
            }
            let name = setting.environment_name();
            if let Some(text) = lookup(&name) {
                self.set(setting, text, Origin::Environment(name))?;
            }
        }
        // A warning, not an error: Kubernetes injects TIDEPOOL_MASTER_SERVICE_HOST and its like by itself.
        let injected = |name: &str| name.contains("_SERVICE_") || name.contains("_PORT");
        for (name, _) in environment.iter().filter(|(name, _)| name.starts_with("TIDEPOOL_") && !injected(name)) {
            let known =
                OTHER_ENVIRONMENT.contains(&name.as_str()) || SETTINGS.iter().any(|s| s.environment_name() == *name);
            if !known {
                let names = SETTINGS.iter().map(Setting::environment_name);
                self.warnings.push(format!(
                    "environment {name} is no setting and is ignored; did you mean {}?",
                    closest(name, names)
                ));
            }
        }
        Ok(())
    }

    /// What was odd but not wrong.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The value of a setting, which must be in the table.
    pub fn value(&self, path: &str) -> &Value {
        self.values.get(path).unwrap_or_else(|| panic!("'{path}' is not in the table of settings"))
    }

    fn typed(&self, path: &str) -> Option<&Typed> {
        self.value(path).typed.as_ref()
    }

    /// Text, path or choice; empty when unset.
    pub fn text(&self, path: &str) -> &str {
        &self.value(path).text
    }
    /// A path.
    pub fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(self.text(path))
    }
    /// An address, if set.
    pub fn address(&self, path: &str) -> Option<Address> {
        match self.typed(path) {
            Some(Typed::Address(address)) => Some(address.clone()),
            _ => None,
        }
    }
    /// A list of addresses.
    pub fn addresses(&self, path: &str) -> Vec<Address> {
        match self.typed(path) {
            Some(Typed::Addresses(addresses)) => addresses.clone(),
            _ => Vec::new(),
        }
    }
    /// Members of a quorum.
    pub fn members(&self, path: &str) -> Vec<MemberAddress> {
        match self.typed(path) {
            Some(Typed::Members(members)) => members.clone(),
            _ => Vec::new(),
        }
    }
    /// A duration; zero when unset.
    pub fn duration(&self, path: &str) -> Duration {
        match self.typed(path) {
            Some(Typed::Duration(duration)) => *duration,
            _ => Duration::ZERO,
        }
    }
    /// A size in bytes; zero when unset.
    pub fn size(&self, path: &str) -> u64 {
        match self.typed(path) {
            Some(Typed::Size(bytes)) => *bytes,
            _ => 0,
        }
    }
    /// A whole number; zero when unset.
    pub fn integer(&self, path: &str) -> u64 {
        match self.typed(path) {
            Some(Typed::Integer(number)) => *number,
            _ => 0,
        }
    }
    /// Yes or no; no when unset.
    pub fn boolean(&self, path: &str) -> bool {
        matches!(self.typed(path), Some(Typed::Boolean(true)))
    }
}

/// `8gb`, `4 GB`, `512mb` as Mooncake reads them: powers of 1024.
fn loose_size(text: &str) -> String {
    let compact: String = text.chars().filter(|c| !c.is_whitespace()).collect::<String>().to_ascii_lowercase();
    match compact.strip_suffix('b').unwrap_or(&compact) {
        stem if stem.ends_with(['k', 'm', 'g', 't']) => format!("{stem}ib"),
        _ => compact,
    }
}

fn nearest(key: &str) -> String {
    closest(key, SETTINGS.iter().map(Setting::path))
}

/// The candidate most like `name`. The last part of a path counts as much as the whole, so that `lisen` finds `master.listen`.
pub fn closest(name: &str, candidates: impl Iterator<Item = String>) -> String {
    let last = |text: &str| text.rsplit('.').next().unwrap_or(text).to_owned();
    let likeness = |candidate: &String| {
        let whole = strsim::jaro_winkler(name, candidate);
        let part = strsim::jaro_winkler(&last(name), &last(candidate));
        ((whole + part) * 1e6) as u64
    };
    candidates.max_by_key(likeness).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tidepool.toml");
        std::fs::write(&path, text).unwrap();
        (dir, path)
    }

    fn environment(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
    }

    #[test]
    fn later_layers_win_and_each_value_knows_its_origin() {
        let (_dir, path) = file(
            "masters = ['a', 'b:7']\ndeadline = '1s'\n[master]\nnode_id = 2\nlease_ttl = '3s'\n[datanode]\ndram = '2GiB'\n",
        );
        let mut layers = Layers { file: Some(path.clone()), ..Layers::default() };
        let config = layers.resolve().unwrap();
        assert_eq!(config.addresses("masters").iter().map(Address::to_string).collect::<Vec<_>>(), ["a:50051", "b:7"]);
        assert_eq!(config.integer("master.node_id"), 2);
        assert_eq!(config.value("master.node_id").origin, Origin::File(path.clone()));
        assert_eq!(config.value("master.listen").origin, Origin::Default);

        layers.environment = environment(&[
            ("TIDEPOOL_DEADLINE", "2s"),
            ("TIDEPOOL_MASTER_LEASE_TTL", "4s"),
            ("MOONCAKE_MASTER", "c:9"),
        ]);
        let config = layers.resolve().unwrap();
        assert_eq!(config.duration("deadline"), Duration::from_secs(2));
        assert_eq!(config.value("deadline").origin, Origin::Environment("TIDEPOOL_DEADLINE".into()));
        assert_eq!(config.addresses("masters")[0].to_string(), "c:9");
        assert_eq!(config.value("masters").origin.to_string(), "environment MOONCAKE_MASTER");

        layers.flags = vec![FlagValue::own("deadline", "3s")];
        let config = layers.resolve().unwrap();
        assert_eq!(config.duration("deadline"), Duration::from_secs(3));
        assert_eq!(config.value("deadline").origin.to_string(), "flag --deadline");
        assert_eq!(config.duration("master.lease_ttl"), Duration::from_secs(4));
        assert_eq!(config.size("datanode.dram"), 2 << 30);
    }

    #[test]
    fn our_name_wins_over_the_foreign_one() {
        let layers = Layers {
            environment: environment(&[("TIDEPOOL_MASTERS", "ours"), ("MOONCAKE_MASTER", "theirs")]),
            ..Layers::default()
        };
        assert_eq!(layers.resolve().unwrap().addresses("masters")[0].host(), "ours");
    }

    #[test]
    fn an_unknown_key_names_the_nearest_known_one() {
        for (text, wrong, known) in [
            ("[master]\nlisen = '::1'", "master.lisen", "master.listen"),
            ("mastrs = 'a'", "mastrs", "masters"),
            ("[datanode]\nnode_id = 1\n", "datanode.node_id", "master.node_id"),
            ("[datanod]\ndram = '1GiB'", "datanod.dram", "datanode.dram"),
            ("listen = '::1'", "listen", "listen"),
        ] {
            let (_dir, path) = file(text);
            let error = Layers { file: Some(path), ..Layers::default() }.resolve().unwrap_err().to_string();
            assert!(error.contains(&format!("unknown key '{wrong}'")), "{error}");
            assert!(error.contains(known), "{error}");
        }
        let (_dir, path) = file("[mastr]\n");
        let error = Layers { file: Some(path), ..Layers::default() }.resolve().unwrap_err().to_string();
        assert!(error.contains("unknown table [mastr]"), "{error}");
    }

    #[test]
    fn a_bad_value_names_key_origin_and_what_is_accepted() {
        let (_dir, path) = file("deadline = 5");
        let error = Layers { file: Some(path), ..Layers::default() }.resolve().unwrap_err().to_string();
        assert!(error.contains("deadline = '5' (file ") && error.contains("with its unit"), "{error}");
        let layers = Layers { flags: vec![FlagValue::own("master.election", "fast")], ..Layers::default() };
        let error = layers.resolve().unwrap_err().to_string();
        assert!(error.contains("flag --election") && error.contains("lan, default, wan"), "{error}");
        let (_dir, path) = file("deadline = 1.5");
        assert!(
            Layers { file: Some(path), ..Layers::default() }
                .resolve()
                .unwrap_err()
                .to_string()
                .contains("expected duration")
        );
        let (_dir, path) = file("deadline = ");
        assert!(
            Layers { file: Some(path), ..Layers::default() }
                .resolve()
                .unwrap_err()
                .to_string()
                .contains("not valid TOML")
        );
    }

    #[test]
    fn an_unknown_environment_name_warns_and_kubernetes_names_do_not() {
        let layers = Layers {
            environment: environment(&[
                ("TIDEPOOL_DEADLINES", "2s"),
                ("TIDEPOOL_MASTER_SERVICE_HOST", "10.0.0.1"),
                ("TIDEPOOL_MASTER_PORT_50051_TCP", "tcp://10.0.0.1:50051"),
            ]),
            ..Layers::default()
        };
        let config = layers.resolve().unwrap();
        assert_eq!(config.warnings().len(), 1, "{:?}", config.warnings());
        assert!(config.warnings()[0].contains("TIDEPOOL_DEADLINE?"));
    }

    #[test]
    fn foreign_values_read_in_their_own_units() {
        let foreign = |path: &str, name: &str, unit, text: &str| FlagValue {
            path: path.into(),
            flag: name.into(),
            unit,
            text: text.into(),
        };
        let layers = Layers {
            flags: vec![
                foreign("master.lease_ttl", "default_kv_lease_ttl", Unit::Milliseconds, "7000"),
                foreign("datanode.dram", "global_segment_size", Unit::LooseSize, "4 GB"),
                foreign("datanode.listen", "port", Unit::Port, "7"),
            ],
            ..Layers::default()
        };
        let config = layers.resolve().unwrap();
        assert_eq!(config.duration("master.lease_ttl"), Duration::from_secs(7));
        assert_eq!(config.size("datanode.dram"), 4 << 30);
        assert_eq!(config.address("datanode.listen").unwrap().to_string(), "127.0.0.1:7");
    }
}
