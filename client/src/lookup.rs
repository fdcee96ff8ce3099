//! Calls that only ask the directory: exist, stat, list. They may be repeated freely.

use std::sync::Arc;

use bytes::Bytes;
use futures::future::join_all;
use tidepool_proto::keys::check_key;
use tidepool_proto::v1::{self, client_request, client_response};
use tidepool_proto::{Error, ErrorCode, object};

use crate::call::{Caller, malformed};
use crate::deadline::Deadline;
use crate::nodes;
use crate::stat::{ListFilter, ListPage, ListedObject, ObjectStat, ReplicaStat};
use crate::suspects::Suspects;
use crate::unreadable::Unreadable;

/// Keys in one message; larger batches travel as several.
pub(crate) const KEYS_PER_REQUEST_MAX: usize = 512;
/// Key bytes in one message.
pub(crate) const KEY_BYTES_PER_REQUEST_MAX: usize = 512 << 10;

/// The valid keys of a batch in messages of bounded size, and the refusal of each that is not valid.
/// Positions are kept, so duplicates each have their own result (user report 112).
pub(crate) fn split<'k, K: AsRef<[u8]>, T>(
    keys: &'k [K],
    results: &mut [Option<Result<T, Error>>],
) -> Vec<Vec<(usize, &'k [u8])>> {
    let (mut chunks, mut chunk, mut bytes) = (Vec::new(), Vec::new(), 0);
    for (position, key) in keys.iter().enumerate() {
        let key = key.as_ref();
        if let Err(error) = check_key(key) {
            results[position] = Some(Err(error));
            continue;
        }
        if chunk.len() == KEYS_PER_REQUEST_MAX || bytes + key.len() > KEY_BYTES_PER_REQUEST_MAX {
            chunks.push(std::mem::take(&mut chunk));
            bytes = 0;
        }
        bytes += key.len();
        chunk.push((position, key));
    }
    if !chunk.is_empty() {
        chunks.push(chunk);
    }
    chunks
}

/// Every position has its result, or this is a bug that is reported as one.
pub(crate) fn complete<T>(results: Vec<Option<Result<T, Error>>>) -> Vec<Result<T, Error>> {
    let missing = || Error::new(ErrorCode::Internal, "the client lost the result of this item");
    results.into_iter().map(|result| result.unwrap_or_else(|| Err(missing()))).collect()
}

/// Runs `one` for each chunk at once and puts its results in place.
async fn fan_out<'k, K, T, F>(keys: &'k [K], one: impl Fn(Vec<&'k [u8]>) -> F) -> Vec<Result<T, Error>>
where
    K: AsRef<[u8]>,
    F: Future<Output = Result<Vec<Result<T, Error>>, Error>>,
{
    let mut results: Vec<Option<Result<T, Error>>> = keys.iter().map(|_| None).collect();
    let chunks = split(keys, &mut results);
    let answers = join_all(chunks.into_iter().map(|chunk| {
        let (positions, keys): (Vec<usize>, Vec<&[u8]>) = chunk.into_iter().unzip();
        let answer = one(keys);
        async move { (positions, answer.await) }
    }))
    .await;
    for (positions, answer) in answers {
        match answer {
            Ok(items) => {
                for (position, item) in positions.into_iter().zip(items) {
                    results[position] = Some(item);
                }
            }
            Err(error) => {
                for position in positions {
                    results[position] = Some(Err(error.clone()));
                }
            }
        }
    }
    complete(results)
}

/// Directory lookups of one client.
pub(crate) struct Lookup {
    pub(crate) caller: Arc<Caller>,
    pub(crate) suspects: Arc<Suspects>,
    pub(crate) unreadable: Arc<Unreadable>,
}

impl Lookup {
    pub(crate) async fn exist_many<K: AsRef<[u8]>>(&self, keys: &[K], deadline: Deadline) -> Vec<Result<bool, Error>> {
        fan_out(keys, |keys| async move {
            let packed = v1::Keys::pack(&keys);
            let answer = self.caller.call("exist", deadline, |_| {
                client_request::Body::Exist(v1::ExistRequest {
                    keys: Some(packed.clone()),
                    lease_mode: v1::LeaseMode::Grant as i32,
                    lease_ttl_ms: 0,
                    suspect_nodes: self.suspects.list(),
                })
            });
            match answer.await.map_err(|f| f.error)?.body {
                client_response::Body::Exist(exist) if exist.present.len() == keys.len() => {
                    let readable =
                        |key: &[u8]| !self.unreadable.contains(|| object::key_hash(&self.caller.tenant, key));
                    let present = exist.present.iter().zip(&keys);
                    Ok(present.map(|(&present, key)| Ok(present != 0 && readable(key))).collect())
                }
                _ => Err(malformed("exist", "not one answer a key")),
            }
        })
        .await
    }

    pub(crate) async fn stat_many<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        deadline: Deadline,
    ) -> Vec<Result<ObjectStat, Error>> {
        fan_out(keys, |keys| async move {
            let packed = v1::Keys::pack(&keys);
            let answer = self
                .caller
                .call("stat", deadline, |_| client_request::Body::Stat(v1::StatRequest { keys: Some(packed.clone()) }));
            let stat = match answer.await.map_err(|f| f.error)?.body {
                client_response::Body::Stat(stat) if stat.objects.len() == keys.len() => stat,
                _ => return Err(malformed("stat", "not one answer a key")),
            };
            let nodes = nodes::index(stat.nodes);
            let describe = |(object, key): (v1::ObjectStat, &&[u8])| {
                if object.code != 0 {
                    return Err(by_code(object.code, key));
                }
                let replicas = object.replicas.into_iter().map(|replica| {
                    let node = nodes.get(&replica.node_id);
                    ReplicaStat {
                        address: node.map(|n| n.address.to_string()).unwrap_or_default(),
                        host_id: node.map(|n| n.host_id.clone()).unwrap_or_default(),
                        replica,
                    }
                });
                Ok(ObjectStat {
                    object_id: object.object_id,
                    length: object.length,
                    state: object.state,
                    replicas: replicas.collect(),
                    leases: object.leases,
                    lease_remaining_ms: object.lease_remaining_ms,
                    age_ms: object.age_ms,
                    data_type: v1::DataType::try_from(object.data_type).unwrap_or_default(),
                    hard_pinned: object.hard_pinned,
                    soft_pin_remaining_ms: object.soft_pin_remaining_ms,
                    group: object.group,
                })
            };
            Ok(stat.objects.into_iter().zip(&keys).map(describe).collect())
        })
        .await
    }

    pub(crate) async fn list(
        &self,
        filter: &ListFilter,
        limit: u32,
        after: &[u8],
        deadline: Deadline,
    ) -> Result<ListPage, Error> {
        let after = Bytes::copy_from_slice(after);
        let answer = self.caller.call("list", deadline, |_| {
            client_request::Body::List(v1::ListRequest {
                prefix: filter.matching.prefix.clone(),
                limit,
                after: after.clone(),
                regex: filter.matching.regex.clone(),
                data_type: filter.data_type.map_or(0, |wanted| wanted as i32),
            })
        });
        let client_response::Body::List(page) = answer.await.map_err(|f| f.error)?.body else {
            return Err(malformed("list", "another message"));
        };
        let objects = page.objects.into_iter().map(|o| ListedObject {
            key: o.key,
            object_id: o.object_id,
            length: o.length,
            replicas: o.replicas,
            data_type: v1::DataType::try_from(o.data_type).unwrap_or_default(),
            hard_pinned: o.hard_pinned,
        });
        let objects: Vec<ListedObject> = objects.collect();
        // A master that names no place to resume from means: after the last one listed.
        let next = match objects.last() {
            Some(last) if page.next.is_empty() => last.key.clone(),
            _ => page.next,
        };
        Ok(ListPage { objects, more: page.more, next })
    }
}

/// The error of a per-key code that came without a message.
pub(crate) fn by_code(code: u32, key: &[u8]) -> Error {
    let code = ErrorCode::from_u32(code);
    let key = String::from_utf8_lossy(&key[..key.len().min(256)]);
    let what = match code {
        ErrorCode::ObjectNotFound => "is not in the pool",
        ErrorCode::NotReady => "is being put and has no complete copy yet",
        ErrorCode::ReplicaUnavailable => "has copies only on datanodes that this client cannot reach",
        _ => "cannot be located",
    };
    Error::new(code, format!("key '{key}' {what}"))
}
