//! Whose history an id belongs to (I1). A directory that goes on in another cluster, restored or recovered, keeps its ids and
//! its log indexes: whatever was made below the index at which the present history begins belongs to an ancestor.

use super::limits::ANCESTORS_MAX;
use tidepool_proto::{ClusterId, Error, ErrorCode, History, OpId};

/// A cluster that this directory was in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ancestor {
    /// Cluster.
    pub cluster: ClusterId,
    /// Its history.
    pub history: History,
    /// Log index of the op with which the next history began: ids below it are of this one, or of one before it.
    pub until: u64,
}

/// All of them, oldest first.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Ancestors(Vec<Ancestor>);

impl Ancestors {
    /// None, or in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Ancestor> + DoubleEndedIterator {
        self.0.iter()
    }

    /// History of what an op made; none: the present one.
    pub fn history_of(&self, id: OpId) -> Option<History> {
        // Almost always there is none, or the id is younger than the last one.
        let last = self.0.last().filter(|last| id.log_index() < last.until)?;
        let first = self.0.iter().find(|ancestor| id.log_index() < ancestor.until);
        Some(first.unwrap_or(last).history)
    }

    /// Whether the directory was in this cluster and history.
    pub fn names(&self, cluster: &[u8], history: u64) -> bool {
        self.0.iter().any(|ancestor| ancestor.cluster.0[..] == *cluster && ancestor.history.0 == history)
    }

    /// Whether the directory was in this cluster.
    pub fn names_cluster(&self, cluster: &[u8]) -> bool {
        self.0.iter().any(|ancestor| ancestor.cluster.0[..] == *cluster)
    }

    /// Adds the youngest.
    pub(super) fn push(&mut self, ancestor: Ancestor) -> Result<(), Error> {
        let refuse = |code, what: String| Err(Error::new(code, what));
        if self.0.len() >= ANCESTORS_MAX {
            return refuse(
                ErrorCode::ResourceExhausted,
                format!("the directory went through {ANCESTORS_MAX} histories, the limit; begin a new cluster"),
            );
        }
        if ancestor.history.0 == 0 || ancestor.cluster == ClusterId::default() {
            return refuse(ErrorCode::InvalidParams, "history 0 and cluster 0 name nothing".to_owned());
        }
        if self.0.last().is_some_and(|last| ancestor.until <= last.until) {
            let what = format!("a history that begins at {} is no younger than the last one", ancestor.until);
            return refuse(ErrorCode::InvalidParams, what);
        }
        self.0.push(ancestor);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ancestor(number: u8, until: u64) -> Ancestor {
        Ancestor { cluster: ClusterId([number; 16]), history: History(number.into()), until }
    }

    #[test]
    fn an_id_belongs_to_the_first_history_that_ended_after_it() {
        let mut ancestors = Ancestors::default();
        let of = |ancestors: &Ancestors, index| ancestors.history_of(OpId::new(index, 3, 1)).map(|h| h.0);
        assert_eq!(of(&ancestors, 5), None);
        ancestors.push(ancestor(1, 10)).unwrap();
        ancestors.push(ancestor(2, 20)).unwrap();
        let found: Vec<_> = [0, 9, 10, 11, 19, 20, 21].iter().map(|&index| of(&ancestors, index)).collect();
        assert_eq!(found, [Some(1), Some(1), Some(2), Some(2), Some(2), None, None]);
        assert!(ancestors.names(&[2; 16], 2) && !ancestors.names(&[2; 16], 1) && ancestors.names_cluster(&[1; 16]));
    }

    #[test]
    fn what_makes_no_sense_and_what_is_too_much_is_refused() {
        let mut ancestors = Ancestors::default();
        for i in 0..ANCESTORS_MAX as u64 {
            ancestors.push(ancestor(1 + i as u8, 10 + i)).unwrap();
            assert_eq!(
                ancestors.push(ancestor(0, 100)).unwrap_err().code(),
                if i + 1 == ANCESTORS_MAX as u64 { ErrorCode::ResourceExhausted } else { ErrorCode::InvalidParams }
            );
        }
        assert!(Ancestors::default().push(Ancestor { history: History(0), ..ancestor(1, 1) }).is_err());
        let mut one = Ancestors::default();
        one.push(ancestor(1, 10)).unwrap();
        assert!(one.push(ancestor(2, 10)).is_err(), "no younger");
    }
}
