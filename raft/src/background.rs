//! Threads for long work that may wait, such as writing and publishing images: of their own, because a thread's priority
//! cannot be raised again without privileges, and of low priority, so that they take no processor from who serves.

use std::io;

/// Added to the thread's nice value.
const NICE: i32 = 10;

/// Runs `work` on a thread of low priority. Dropped, the work goes on.
pub async fn background<T, F>(name: &str, work: F) -> io::Result<T>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    let (done, result) = tokio::sync::oneshot::channel();
    let run = move || {
        if let Err(error) = rustix::process::nice(NICE) {
            tracing::warn!(%error, "a thread keeps its priority");
        }
        // Nobody waits any more: the result goes with them.
        let _ = done.send(work());
    };
    std::thread::Builder::new().name(format!("tidepool-{name}")).spawn(run)?;
    result.await.map_err(|_| io::Error::other(format!("the thread tidepool-{name} ended without a result")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_thread_is_nice_and_the_caller_is_not() {
        let own = || rustix::process::getpriority_process(None).unwrap();
        let before = own();
        let inside = background("test", own).await.unwrap();
        assert_eq!((inside, own()), ((before + NICE).min(19), before));
    }

    #[tokio::test]
    async fn a_panic_is_an_error() {
        let error = background("test", || assert!(std::hint::black_box(false), "on purpose")).await.unwrap_err();
        assert!(error.to_string().contains("tidepool-test"), "{error}");
    }
}
