//! The receiving end of the gRPC network. Errors travel inside the messages; only a broken transport is a status.

use std::pin::Pin;

use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use tidepool_proto::v1::raft_service_server::{RaftService, RaftServiceServer};
use tidepool_proto::{Error, ErrorCode, v1};
use tonic::{Request, Response, Status, Streaming};

use super::MESSAGE_BYTES_MAX;
use crate::host::Host;
use crate::inbound::Inbound;
use crate::machine::StateMachine;
use crate::network::Call;

/// Answers the other members over gRPC.
pub struct GrpcService<C: Host<Outcome = M::Outcome>, M: StateMachine> {
    inbound: Inbound<C, M>,
}

impl<C: Host<Outcome = M::Outcome>, M: StateMachine> GrpcService<C, M> {
    /// The service, ready to be mounted.
    pub fn server(inbound: Inbound<C, M>) -> RaftServiceServer<GrpcService<C, M>> {
        RaftServiceServer::new(GrpcService { inbound })
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX)
    }

    async fn answer(&self, call: Call, request: v1::ConsensusMessage) -> v1::ConsensusMessage {
        let answer = match self.inbound.admit(request.identity.as_ref(), request.target_node_id, &request.store_uuid) {
            Ok(()) => self.inbound.call(call, request.payload).await,
            Err(error) => Err(error),
        };
        consensus(answer)
    }

    async fn take_snapshot(&self, chunks: &mut Streaming<v1::SnapshotChunk>) -> Result<Bytes, Error> {
        let first = chunks.message().await.map_err(cut)?.ok_or_else(|| cut(Status::aborted("no first message")))?;
        self.inbound.admit(first.identity.as_ref(), first.target_node_id, &first.store_uuid)?;
        let arrival = self.inbound.snapshot(first.header).await?;
        while let Some(chunk) = chunks.message().await.map_err(cut)? {
            arrival.chunk(chunk.offset, chunk.data, chunk.crc32c).await?;
        }
        arrival.finish().await
    }
}

fn cut(status: Status) -> Error {
    Error::new(ErrorCode::TransferFailed, format!("the snapshot's stream broke: {}", status.message()))
}

fn consensus(answer: Result<Bytes, Error>) -> v1::ConsensusMessage {
    match answer {
        Ok(payload) => v1::ConsensusMessage { payload, ..Default::default() },
        Err(error) => v1::ConsensusMessage { error: Some(error.into()), ..Default::default() },
    }
}

fn append_answer(answer: Result<Bytes, Error>) -> v1::AppendResponse {
    match answer {
        Ok(payload) => v1::AppendResponse { payload, error: None },
        Err(error) => v1::AppendResponse { error: Some(error.into()), payload: Bytes::new() },
    }
}

type Answers = Pin<Box<dyn Stream<Item = Result<v1::AppendResponse, Status>> + Send>>;

#[tonic::async_trait]
impl<C: Host<Outcome = M::Outcome>, M: StateMachine> RaftService for GrpcService<C, M> {
    async fn handshake(
        &self,
        request: Request<v1::HandshakeRequest>,
    ) -> Result<Response<v1::HandshakeResponse>, Status> {
        Ok(Response::new(self.inbound.handshake(request.into_inner()).await))
    }

    async fn prepare(&self, request: Request<v1::PrepareRequest>) -> Result<Response<v1::PrepareResponse>, Status> {
        Ok(Response::new(self.inbound.prepare(request.into_inner()).await))
    }

    type AppendStream = Answers;

    async fn append(&self, request: Request<Streaming<v1::AppendRequest>>) -> Result<Response<Answers>, Status> {
        let inbound = self.inbound.clone();
        let mut requests = request.into_inner();
        // The headers go out at once; the first message is judged inside the stream.
        let answers = async move {
            let first = match requests.message().await {
                Ok(Some(first)) => first,
                Ok(None) | Err(_) => return stream::empty().boxed(),
            };
            if let Err(error) = inbound.admit(first.identity.as_ref(), first.target_node_id, &first.store_uuid) {
                return stream::once(async { append_answer(Err(error)) }).boxed();
            }
            // A broken transport ends the requests; what was taken in is still answered.
            let rest = StreamExt::scan(requests, (), |(), message| std::future::ready(message.ok()));
            let payloads = stream::once(async { first }).chain(rest).map(|message| message.payload);
            inbound.append(payloads.boxed()).map(append_answer).boxed()
        };
        let answers = stream::once(answers).flatten().map(Ok);
        Ok(Response::new(Box::pin(answers)))
    }

    async fn beat(&self, request: Request<v1::ConsensusMessage>) -> Result<Response<v1::ConsensusMessage>, Status> {
        Ok(Response::new(self.answer(Call::Beat, request.into_inner()).await))
    }

    async fn vote(&self, request: Request<v1::ConsensusMessage>) -> Result<Response<v1::ConsensusMessage>, Status> {
        Ok(Response::new(self.answer(Call::Vote, request.into_inner()).await))
    }

    async fn pre_vote(&self, request: Request<v1::ConsensusMessage>) -> Result<Response<v1::ConsensusMessage>, Status> {
        Ok(Response::new(self.answer(Call::PreVote, request.into_inner()).await))
    }

    async fn transfer_leader(
        &self,
        request: Request<v1::ConsensusMessage>,
    ) -> Result<Response<v1::ConsensusMessage>, Status> {
        Ok(Response::new(self.answer(Call::TransferLeader, request.into_inner()).await))
    }

    async fn offer_snapshot(
        &self,
        request: Request<v1::ConsensusMessage>,
    ) -> Result<Response<v1::ConsensusMessage>, Status> {
        Ok(Response::new(self.answer(Call::OfferSnapshot, request.into_inner()).await))
    }

    async fn snapshot(
        &self,
        request: Request<Streaming<v1::SnapshotChunk>>,
    ) -> Result<Response<v1::ConsensusMessage>, Status> {
        let mut chunks = request.into_inner();
        Ok(Response::new(consensus(self.take_snapshot(&mut chunks).await)))
    }
}
