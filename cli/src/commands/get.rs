//! `tidepool get KEY`.

use std::io::Write;
use std::path::Path;

use anyhow::Context as _;
use tidepool_client::GetRange;

use super::{Context, failed};
use crate::args::GetArgs;
use crate::exit::Exit;
use crate::output;

/// Writes the verified bytes of one object, or of a part of it, to stdout, or to a file that appears whole or not at all.
pub async fn run(context: &Context, args: &GetArgs) -> anyhow::Result<Exit> {
    let client = context.client().await?;
    let deadline = Some(context.deadline());
    let bytes = match args.length {
        None => client.get(&args.key, deadline).await,
        Some(length) => {
            let range = GetRange { key: args.key.clone().into(), offset: args.offset, length };
            client.get_range(range, deadline).await
        }
    };
    let bytes = bytes.map_err(|error| failed("get", &args.key, &error))?;
    match &args.out {
        None => output::print(&bytes)?,
        Some(path) => write(path, &bytes)?,
    }
    Ok(Exit::Success)
}

fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let describe = || format!("cannot write {}", path.display());
    let mut file = tempfile::NamedTempFile::new_in(directory).with_context(describe)?;
    file.write_all(bytes).with_context(describe)?;
    file.persist(path).with_context(describe)?;
    Ok(())
}
