//! The command line: members, what they save, and the feature level.

use std::path::PathBuf;

use clap::Subcommand;
use tidepool_proto::Address;
use tidepool_raft::{OpPlace, PayloadHash};

use crate::config::setting::MASTER_PORT;

/// `tidepool member`.
#[derive(clap::Args, Debug)]
pub struct MemberArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: MemberCommand,
}

/// What to do with the members of the quorum. Every change may be repeated: what was done is not done again.
#[derive(Subcommand, Debug)]
pub enum MemberCommand {
    /// Show the members: role, how far each is, when it was heard
    List,
    /// Take in a new master, which was started with --join
    Add {
        /// Its node id, which was never used before, and its address
        #[arg(value_name = "ID@HOST[:PORT]", value_parser = parse_new_member)]
        member: NewMember,
        /// Only say what would be done
        #[arg(long)]
        dry_run: bool,
    },
    /// Remove a master for good, also one that is dead
    Remove {
        /// Its node id
        id: u64,
        /// Only say what would be done
        #[arg(long)]
        dry_run: bool,
    },
    /// Take in a new master in place of another
    Replace {
        /// Node id of the one that leaves
        old: u64,
        /// Node id, never used before, and address of the new one
        #[arg(value_name = "ID@HOST[:PORT]", value_parser = parse_new_member)]
        new: NewMember,
        /// Only say what would be done
        #[arg(long)]
        dry_run: bool,
    },
    /// The last resort on a stopped master: when a majority is lost for ever, one op stops all of them, or their states differ
    Recover {
        /// From the data of this host's master; there is no other way yet
        #[arg(long, required_unless_present_any = ["skip", "start_over"])]
        from_this_node: bool,
        /// What the lost masters had acknowledged, and this one has not, is gone
        #[arg(long, requires = "from_this_node")]
        accept_data_loss: bool,
        /// On a stopped master whose state is not to be trusted: begin the next start with the last snapshot that a majority
        /// vouched for, and apply the log again
        #[arg(long, conflicts_with_all = ["from_this_node", "skip"])]
        start_over: bool,
        /// On a majority of the stopped masters: leave out the op that stops them all, as their logs name it
        #[arg(long, value_name = "INDEX.ORDINAL", conflicts_with = "from_this_node")]
        skip: Option<OpPlace>,
        /// Hash of that entry, as the log of the stopped master says it; without it nothing is changed and the hash is shown
        #[arg(long, value_name = "HASH", requires = "skip")]
        hash: Option<PayloadHash>,
        /// Its data directory; without it, master.data_dir
        #[arg(long, value_name = "PATH")]
        data_dir: Option<PathBuf>,
    },
}

/// A master that is to be taken in.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NewMember {
    /// Its id.
    pub node_id: u64,
    /// Where the others will reach it.
    pub address: Address,
}

fn parse_new_member(text: &str) -> Result<NewMember, String> {
    let (id, host) = text.split_once('@').ok_or("expected ID@HOST[:PORT], such as 4@h4")?;
    let node_id = id.parse::<u64>().ok().filter(|id| (1..=u64::from(u32::MAX)).contains(id));
    let node_id = node_id.ok_or_else(|| format!("'{id}' is no node id: a whole number from 1"))?;
    let address = Address::parse(host, MASTER_PORT).map_err(|error| error.message().to_owned())?;
    Ok(NewMember { node_id, address })
}

/// `tidepool snapshot`.
#[derive(clap::Args, Debug)]
pub struct SnapshotArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: SnapshotCommand,
}

/// What to do with snapshots.
#[derive(Subcommand, Debug)]
pub enum SnapshotCommand {
    /// Have a master write its directory now, and publish it if it was told where
    Take {
        /// Node id of that master; without it, a standby if there is one
        #[arg(long, value_name = "NODE_ID")]
        node: Option<u64>,
    },
    /// List what is published; needs no master
    List {
        /// Where.
        #[command(flatten)]
        from: SnapshotFrom,
    },
    /// Read every byte of what is published; exit code 7 when nothing could be restored, 6 when some could not
    Verify {
        /// Where.
        #[command(flatten)]
        from: SnapshotFrom,
    },
    /// Say whose a snapshot is and what is in it; without a name, the newest
    Show {
        /// Where.
        #[command(flatten)]
        from: SnapshotFrom,
    },
}

/// Which snapshots are meant.
#[derive(clap::Args, Debug)]
pub struct SnapshotFrom {
    /// Only this one: its name, or its path below the URL
    pub snapshot: Option<String>,
    /// Where they are: file:///path or s3://bucket/prefix; without it, master.snapshot_url
    #[arg(long, value_name = "URL")]
    pub from: Option<String>,
}

/// `tidepool feature-level`.
#[derive(clap::Args, Debug)]
pub struct FeatureLevelArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: FeatureLevelCommand,
}

/// What to do with the feature level.
#[derive(Subcommand, Debug)]
pub enum FeatureLevelCommand {
    /// Show the level of the quorum, and the highest that each master's binary knows
    Show,
    /// Raise it, for good: older binaries take part no more
    Raise {
        /// Level; without it, the highest that all masters know
        #[arg(long, value_name = "LEVEL")]
        to: Option<u32>,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_member_is_an_id_at_an_address() {
        let member = parse_new_member("4@h4").unwrap();
        assert_eq!((member.node_id, member.address.to_string()), (4, format!("h4:{MASTER_PORT}")));
        assert_eq!(parse_new_member("7@[::1]:9").unwrap().address.to_string(), "[::1]:9");
        for text in ["h4", "4=h4", "0@h4", "x@h4", "4@", "4@h:x", "99999999999@h"] {
            assert!(parse_new_member(text).is_err(), "{text}");
        }
    }
}
