//! The store's directory: its identity and format version in one small checksummed file beside the database.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use super::disk::StoreId;
use super::error::OpenLogError;

/// Format of the store. A directory of a higher one is refused before anything in it is touched.
pub const FORMAT_VERSION: u32 = 1;

const FILE: &str = "STORE";
const TITLE: &str = "tidepool raft log";

/// Where the database of a store lies.
pub(crate) fn database(path: &Path) -> PathBuf {
    path.join("db")
}

/// Reads the identity file; `None` where there is none.
pub(crate) fn read(path: &Path) -> Result<Option<StoreId>, OpenLogError> {
    let text = match fs::read_to_string(path.join(FILE)) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(OpenLogError::Io { path: path.to_owned(), error }),
    };
    let bad = |detail: String| OpenLogError::NotAStore { path: path.to_owned(), detail };
    // The version is looked at before the checksum: a later format may lay out the rest differently.
    let mut lines = text.lines();
    if lines.next() != Some(TITLE) {
        return Err(bad(format!("{FILE} does not begin with '{TITLE}'")));
    }
    let mut field = |name: &str| {
        let line = lines.next().and_then(|line| line.strip_prefix(name)).and_then(|rest| rest.strip_prefix(": "));
        line.ok_or_else(|| bad(format!("{FILE} has no {name}")))
    };
    let format = field("format")?;
    let found: u32 = format.parse().map_err(|_| bad(format!("{FILE} has format '{format}'")))?;
    if found > FORMAT_VERSION {
        return Err(OpenLogError::NewerFormat { path: path.to_owned(), found, known: FORMAT_VERSION });
    }
    let id: StoreId = field("store")?.parse().map_err(bad)?;
    if render(found, id) != text {
        return Err(bad(format!("the checksum of {FILE} does not match")));
    }
    Ok(Some(id))
}

/// Publishes the identity file: whole or not at all.
pub(crate) fn write(path: &Path, id: StoreId) -> io::Result<()> {
    let temporary = path.join(format!("{FILE}.tmp"));
    let mut file = File::create(&temporary)?;
    file.write_all(render(FORMAT_VERSION, id).as_bytes())?;
    file.sync_all()?;
    fs::rename(&temporary, path.join(FILE))?;
    sync_directory(path)?;
    // The directory itself may be new.
    path.parent().map_or(Ok(()), |parent| if parent.as_os_str().is_empty() { Ok(()) } else { sync_directory(parent) })
}

fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

fn render(format: u32, id: StoreId) -> String {
    let body = format!("{TITLE}\nformat: {format}\nstore: {id}\n");
    let checksum = crc32c::crc32c(body.as_bytes());
    format!("{body}crc32c: {checksum:08x}\n")
}
