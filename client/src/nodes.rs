//! What an answer of the master says about datanodes: addresses and hosts by node id.

use hashbrown::HashMap;
use tidepool_proto::{Address, v1};

/// Port of a datanode when an address names none.
const DATANODE_PORT_DEFAULT: u16 = 50052;

/// A datanode as one answer names it.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) address: Address,
    pub(crate) host_id: String,
}

/// Nodes of one answer, by id. Those whose address does not parse are left out, and said so.
pub(crate) fn index(nodes: Vec<v1::NodeAddress>) -> HashMap<u64, Node> {
    let mut index = HashMap::with_capacity(nodes.len());
    for node in nodes {
        match Address::parse(&node.address, DATANODE_PORT_DEFAULT) {
            Ok(address) => {
                index.insert(node.node_id, Node { address, host_id: node.host_id });
            }
            Err(error) => tracing::warn!(node = node.node_id, %error, "the master named a datanode by a bad address"),
        }
    }
    index
}
