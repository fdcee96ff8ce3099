//! The port file: the addresses a role really listens on, for whoever started it with port 0.

use std::path::Path;

use anyhow::Context;
use serde::{Deserialize, Serialize};

/// What is in the file, as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortFile {
    /// `master`, `datanode` or `dev`.
    pub role: String,
    /// Process id.
    pub pid: u32,
    /// Id of the master, or of the datanode once it is registered.
    pub node_id: u64,
    /// Address of the RPC port.
    pub rpc: String,
    /// Address of the HTTP port.
    pub http: String,
    /// Address of the datanode's HTTP port, where one process runs both roles.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub datanode_http: Option<String>,
}

impl PortFile {
    /// Writes it atomically: a reader sees the whole file or none.
    pub fn write(&self, path: &Path) -> anyhow::Result<()> {
        let name = path.file_name().with_context(|| format!("port file '{}' names no file", path.display()))?;
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let temporary = directory.join(format!(".{}.{}", name.to_string_lossy(), self.pid));
        let text = serde_json::to_vec_pretty(self)?;
        std::fs::write(&temporary, text)
            .and_then(|()| std::fs::rename(&temporary, path))
            .with_context(|| format!("cannot write the port file {}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_file_reads_back_and_replaces_the_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ports.json");
        for port in [1, 2] {
            let file = PortFile {
                role: "master".into(),
                pid: 7,
                node_id: 1,
                rpc: format!("127.0.0.1:{port}"),
                http: String::new(),
                datanode_http: None,
            };
            file.write(&path).unwrap();
            let back: PortFile = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            assert_eq!(back, file);
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file is left behind");
    }
}
