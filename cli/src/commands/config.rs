//! `tidepool config show | reference`.

use serde_json::{Map, json};

use super::Context;
use crate::config::{Section, Setting};
use crate::exit::Exit;
use crate::output::{self, Format, Table};

/// Prints every setting, its value and where that came from.
pub fn show(context: &Context) -> anyhow::Result<Exit> {
    match context.format {
        Format::Json => {
            let mut all = Map::new();
            for setting in Section::ALL.into_iter().flat_map(Setting::of) {
                let value = context.config.value(&setting.path());
                all.insert(setting.path(), json!({"value": value.text, "origin": value.origin.to_string()}));
            }
            output::print_json(&all.into())?;
        }
        Format::Table => {
            let mut table = Table::new(&["setting", "value", "origin"]);
            for setting in Section::ALL.into_iter().flat_map(Setting::of) {
                let value = context.config.value(&setting.path());
                let text = if value.text.is_empty() { format!("({})", setting.otherwise) } else { value.text.clone() };
                table.row([setting.path(), text, value.origin.to_string()]);
            }
            output::print(table.render(0).as_bytes())?;
        }
    }
    Ok(Exit::Success)
}

/// Prints the reference of all settings.
pub fn reference() -> anyhow::Result<Exit> {
    output::print(reference_text().as_bytes())?;
    Ok(Exit::Success)
}

const INTRODUCTION: &str = "\
# Configuration reference

Each value is taken from, in rising order of weight: the default, the file given by `--config` (TOML), the environment, the flags.
`tidepool config show` prints every value with its origin.

Durations carry a unit (`500ms`, `10s`, `2m`, `1h`), sizes too (`512MiB`, `64GiB`; `GB` is a power of 1000). A setting `some_name` is the
flag `--some-name`. An unknown key in the file is an error that names the nearest known one. Names that Mooncake users know are accepted
for the same thing; their bare numbers keep Mooncake's unit.

<!-- Made by `tidepool config reference`; a test keeps it in step with the code. -->
";

/// The text of `docs/operate/configuration.md`.
pub fn reference_text() -> String {
    let mut text = INTRODUCTION.to_owned();
    for section in Section::ALL {
        let (title, lead) = match section {
            Section::Shared => ("Shared", "At the top level of the file; every command reads them."),
            Section::Master => ("`[master]`", "Of `tidepool master`."),
            Section::Datanode => ("`[datanode]`", "Of `tidepool datanode`."),
        };
        text.push_str(&format!("\n## {title}\n\n{lead}\n\n| key | accepts | default | meaning |\n|---|---|---|---|\n"));
        for setting in Setting::of(section) {
            let default = if setting.default.is_empty() {
                setting.otherwise.to_owned()
            } else {
                format!("`{}`", setting.default)
            };
            let mut meaning = setting.help.to_owned();
            let aliases: Vec<String> = (setting.flags.iter().map(|alias| format!("`--{}`", alias.name)))
                .chain(setting.environment.iter().map(|alias| format!("`{}`", alias.name)))
                .collect();
            if !aliases.is_empty() {
                meaning.push_str(&format!(" (Mooncake: {})", aliases.join(", ")));
            }
            let key = format!("`{}`<br>`{}`", setting.name, setting.environment_name());
            text.push_str(&format!("| {key} | {} | {default} | {meaning} |\n", setting.kind));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    /// Fails when a setting changes and the book does not.
    #[test]
    fn the_books_reference_is_in_step_with_the_table() {
        let page = include_str!("../../../docs/operate/configuration.md");
        assert!(
            page == super::reference_text(),
            "docs/operate/configuration.md is out of step: run tidepool config reference > docs/operate/configuration.md"
        );
    }
}
