//! Puts and gets of memory: what the client is asked, and which items were refused before anything was sent.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tidepool_client::{Client, Error, GetInto, GetRangeInto, PutItem, PutOptions as Options, PutOutcome};

use crate::args::PutOptions;
use crate::buffers::{Loan, Span, to_bytes, to_local, waves};

/// Items that are not sent, by their places.
pub(crate) type Refused = Vec<(usize, Error)>;
/// The memory of each item, or why it is refused.
pub(crate) type Spans = Vec<Result<Vec<Span>, Error>>;

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

/// Items to fill, in waves that follow each other.
pub(crate) struct Filling<T> {
    waves: Vec<Vec<T>>,
    /// Wave of each place; None: it is refused.
    order: Vec<Option<usize>>,
    refused: Refused,
}

impl<T> Filling<T> {
    fn new(mut spans: Spans, mut accept: impl FnMut(usize, Vec<Span>) -> T) -> Filling<T> {
        let wave_of = waves(&mut spans);
        let mut filling =
            Filling { waves: Vec::new(), order: Vec::with_capacity(spans.len()), refused: Refused::new() };
        for (position, (spans, wave)) in spans.into_iter().zip(wave_of).enumerate() {
            match spans {
                Ok(spans) => {
                    if filling.waves.len() <= wave {
                        filling.waves.resize_with(wave + 1, Vec::new);
                    }
                    filling.waves[wave].push(accept(position, spans));
                    filling.order.push(Some(wave));
                }
                Err(error) => {
                    filling.refused.push((position, error));
                    filling.order.push(None);
                }
            }
        }
        filling
    }

    /// Fills wave after wave, all by one deadline.
    async fn fill<F>(self, deadline: Duration, one: impl Fn(Vec<T>, Duration) -> F) -> Vec<Result<u64, Error>>
    where
        F: Future<Output = Vec<Result<u64, Error>>>,
    {
        let until = Instant::now() + deadline;
        let mut filled = Vec::with_capacity(self.waves.len());
        for wave in self.waves {
            let left = until.saturating_duration_since(Instant::now());
            filled.push(one(wave, left).await.into_iter());
        }
        let results = self.order.iter().flatten().filter_map(|&wave| filled[wave].next()).collect();
        merge(results, self.refused)
    }
}

/// What to get.
pub(crate) fn get_items(keys: &[Bytes], spans: Spans, loan: &Arc<Loan>) -> Filling<GetInto> {
    Filling::new(spans, |position, spans| GetInto {
        key: keys[position].clone(),
        into: spans.into_iter().map(|span| to_local(span, loan)).collect(),
    })
}

/// Gets.
pub(crate) async fn get_into(client: Client, items: Filling<GetInto>, deadline: Duration) -> Vec<Result<u64, Error>> {
    items.fill(deadline, |wave, left| client.get_into_many(wave, Some(left))).await
}

/// Which parts to get.
pub(crate) fn range_items(keys: &[Bytes], offsets: Vec<u64>, spans: Spans, loan: &Arc<Loan>) -> Filling<GetRangeInto> {
    Filling::new(spans, |position, spans| GetRangeInto {
        key: keys[position].clone(),
        offset: offsets[position],
        into: spans.into_iter().map(|span| to_local(span, loan)).collect(),
    })
}

/// Gets parts.
pub(crate) async fn get_ranges_into(
    client: Client,
    items: Filling<GetRangeInto>,
    deadline: Duration,
) -> Vec<Result<u64, Error>> {
    items.fill(deadline, |wave, left| client.get_range_into_many(wave, Some(left))).await
}
