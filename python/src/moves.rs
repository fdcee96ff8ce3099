//! Puts and gets of memory: what the client is asked, and which items were refused before anything was sent.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tidepool_client::{
    Client, Error, GetInto, GetRangeInto, PutItem, PutOptions as Options, PutOutcome,
};

use crate::args::PutOptions;
use crate::buffers::{Loan, Span, disjoint, to_bytes, to_local};

/// Items that are not sent, by their places.
pub(crate) type Refused = Vec<(usize, Error)>;
type Spans = Vec<Result<Vec<Span>, Error>>;

/// Options of one call.
pub(crate) fn options(given: Option<&PutOptions>, deadline: Option<Duration>) -> Options {
    match given {
        Some(given) => Options { deadline, ..given.options.clone() },
        None => Options { deadline, independent: true, ..Options::default() },
    }
}

/// Takes out what was refused.
fn sift<T>(spans: Spans, mut accept: impl FnMut(usize, Vec<Span>) -> T) -> (Vec<T>, Refused) {
    let (mut items, mut refused) = (Vec::with_capacity(spans.len()), Refused::new());
    for (position, spans) in spans.into_iter().enumerate() {
        match spans {
            Ok(spans) => items.push(accept(position, spans)),
            Err(error) => refused.push((position, error)),
        }
    }
    (items, refused)
}

/// Puts the refusals back in their places.
fn merge<T>(results: Vec<Result<T, Error>>, refused: Refused) -> Vec<Result<T, Error>> {
    if refused.is_empty() {
        return results;
    }
    let total = results.len() + refused.len();
    let (mut results, mut refused) = (results.into_iter(), refused.into_iter().peekable());
    let mut merged = Vec::with_capacity(total);
    for position in 0..total {
        match refused.next_if(|(place, _)| *place == position) {
            Some((_, error)) => merged.push(Err(error)),
            None => merged.extend(results.next()),
        }
    }
    merged
}

/// What to put.
pub(crate) fn put_items(
    keys: &[Bytes],
    spans: Spans,
    groups: Option<Vec<Bytes>>,
    loan: &Arc<Loan>,
) -> (Vec<PutItem>, Refused) {
    let mut groups = groups.unwrap_or_default();
    sift(spans, |position, spans| PutItem {
        key: keys[position].clone(),
        value: spans.into_iter().map(|span| to_bytes(span, loan)).collect(),
        group: groups.get_mut(position).map(std::mem::take).unwrap_or_default(),
    })
}

/// Puts.
pub(crate) async fn put(
    client: Client,
    items: Vec<PutItem>,
    refused: Refused,
    options: Options,
) -> Vec<Result<PutOutcome, Error>> {
    let results = if items.is_empty() { Vec::new() } else { client.put_many(items, options).await };
    merge(results, refused)
}

/// What to get.
pub(crate) fn get_items(keys: &[Bytes], mut spans: Spans, loan: &Arc<Loan>) -> (Vec<GetInto>, Refused) {
    disjoint(&mut spans);
    sift(spans, |position, spans| GetInto {
        key: keys[position].clone(),
        into: spans.into_iter().map(|span| to_local(span, loan)).collect(),
    })
}

/// Gets.
pub(crate) async fn get_into(
    client: Client,
    items: Vec<GetInto>,
    refused: Refused,
    deadline: Option<Duration>,
) -> Vec<Result<u64, Error>> {
    let results = if items.is_empty() { Vec::new() } else { client.get_into_many(items, deadline).await };
    merge(results, refused)
}

/// Which parts to get.
pub(crate) fn range_items(
    keys: &[Bytes],
    offsets: Vec<u64>,
    mut spans: Spans,
    loan: &Arc<Loan>,
) -> (Vec<GetRangeInto>, Refused) {
    disjoint(&mut spans);
    sift(spans, |position, spans| GetRangeInto {
        key: keys[position].clone(),
        offset: offsets[position],
        into: spans.into_iter().map(|span| to_local(span, loan)).collect(),
    })
}

/// Gets parts.
pub(crate) async fn get_ranges_into(
    client: Client,
    items: Vec<GetRangeInto>,
    refused: Refused,
    deadline: Option<Duration>,
) -> Vec<Result<u64, Error>> {
    let results = if items.is_empty() { Vec::new() } else { client.get_range_into_many(items, deadline).await };
    merge(results, refused)
}
