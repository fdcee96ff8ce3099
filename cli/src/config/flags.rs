//! Flags made from the table of settings, for clap: one flag a setting, plus the names Mooncake users know.

use clap::{Arg, ArgAction, ArgMatches, Command};

use super::layers::FlagValue;
use super::setting::{Section, Setting, Unit};
use super::value::Kind;

/// The flags given for one section.
#[derive(Clone, Debug, Default)]
pub struct Given(pub Vec<FlagValue>);

fn value_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Text => "TEXT",
        Kind::Path => "PATH",
        Kind::Address(_) => "HOST[:PORT]",
        Kind::Addresses(_) => "HOST[:PORT],...",
        Kind::Members(_) => "ID=HOST[:PORT],...",
        Kind::Duration => "DURATION",
        Kind::Size => "SIZE",
        Kind::Integer(..) => "NUMBER",
        Kind::Boolean => "BOOL",
        Kind::Choice(_) => "WORD",
    }
}

fn alias_id(setting: &Setting, name: &str) -> String {
    format!("{}:{name}", setting.path())
}

/// Adds the flags of a section. Shared ones are global: they may stand after the subcommand too.
fn augment(mut command: Command, section: Section) -> Command {
    let global = section == Section::Shared;
    for setting in Setting::of(section) {
        let shown = if setting.default.is_empty() { setting.otherwise } else { setting.default };
        let mut help = format!("{} [default: {shown}]", capitalized(setting.help));
        if let Kind::Choice(words) = setting.kind {
            help.push_str(&format!(" [one of: {}]", words.join(", ")));
        }
        let flag = setting.flag_name();
        let mut arg = Arg::new(setting.path())
            .long(flag.clone())
            .value_name(value_name(setting.kind))
            .help(help)
            .global(global)
            .action(ArgAction::Set);
        if matches!(setting.kind, Kind::Boolean) {
            arg = arg.num_args(0..=1).require_equals(true).default_missing_value("true");
        }
        if flag != setting.name {
            arg = arg.alias(setting.name);
        }
        command = command.arg(if global { arg.help_heading("Shared options") } else { arg });
        for alias in setting.flags {
            command = command.arg(
                Arg::new(alias_id(setting, alias.name))
                    .long(alias.name)
                    .hide(true)
                    .global(global)
                    .action(ArgAction::Set),
            );
        }
    }
    command
}

fn capitalized(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map(|first| first.to_uppercase().chain(chars).collect()).unwrap_or_default()
}

fn collect(matches: &ArgMatches, section: Section) -> Vec<FlagValue> {
    let mut given = Vec::new();
    for setting in Setting::of(section) {
        let mut take = |id: String, flag: String, unit: Unit| {
            if let Ok(Some(text)) = matches.try_get_one::<String>(&id) {
                given.push(FlagValue { path: setting.path(), flag, unit, text: text.clone() });
            }
        };
        // Our own name last: where both are given, it wins.
        for alias in setting.flags {
            take(alias_id(setting, alias.name), alias.name.to_owned(), alias.unit);
        }
        take(setting.path(), setting.flag_name(), Unit::Own);
    }
    given
}

macro_rules! section_flags {
    ($(#[$doc:meta])* $name:ident, $section:expr) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Default)]
        pub struct $name(pub Given);

        impl clap::Args for $name {
            fn augment_args(command: Command) -> Command {
                augment(command, $section)
            }
            fn augment_args_for_update(command: Command) -> Command {
                augment(command, $section)
            }
        }

        impl clap::FromArgMatches for $name {
            fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
                Ok($name(Given(collect(matches, $section))))
            }
            fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
                self.0 = Given(collect(matches, $section));
                Ok(())
            }
        }
    };
}

section_flags!(
    /// Flags every command takes.
    SharedFlags,
    Section::Shared
);
section_flags!(
    /// Flags of `tidepool master`.
    MasterFlags,
    Section::Master
);
section_flags!(
    /// Flags of `tidepool datanode`.
    DatanodeFlags,
    Section::Datanode
);
