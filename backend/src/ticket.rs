//! A request that was taken on, from its first token to its last response. It alone touches the request's
//! objects of Triton's. One way out: final response, statistics, release.

use crate::contract::{Call, Finish, Profile, Reply, Row, RowReply, StopSequences, Times};
use crate::mailbox::TicketId;
use crate::model::Model;
use crate::parameters::ResponseStatistics;
use crate::responder::Ending;
use crate::triton::{self, Error, Instance, Request, ResponseTimes, Tensor, monotonic_ns};
use spec_core::batch::Emitted;
use spec_core::runtime::{TextChunk, TextRules, TextStream};
use spec_core::sequence::FinishReason;
use spec_core::tokenizer::Tokenizer;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A request that was taken on.
pub(crate) struct Ticket {
    pub(crate) id: TicketId,
    /// The client's name for it.
    pub(crate) request_id: String,
    request: Request,
    call: Call,
    /// Names of the outputs that the client wants.
    wanted: Vec<String>,
    rows: Vec<Progress>,
    arrival_ns: u64,
    started_ns: Option<u64>,
    num_responses: usize,
    /// Counts it among the open requests of its instance.
    counted_in: Option<Arc<AtomicUsize>>,
}

/// How far a row is.
struct Progress {
    text: TextStream,
    /// What the next response carries.
    next: RowReply,
    num_tokens: usize,
    stop_sequences: StopSequences,
    /// A stop word was met: later tokens do not count.
    stopped: bool,
    ended: bool,
    times: Times,
}

/// What became of a ticket with some news.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It goes on.
    Open,
    /// A row has met a stop word: the engine need not go on with it.
    RowStopped,
    /// The client has its last response.
    Done,
}

impl Ticket {
    /// A request that arrived at `arrival_ns`, as it was read.
    pub(crate) fn new(id: TicketId, request: Request, call: Call, arrival_ns: u64) -> Self {
        let rows = call.rows.iter().enumerate().map(|(idx, row)| Progress::new(idx, row));
        Self {
            id,
            request_id: request.id(),
            // Without an answer everything is wanted, as if the client had named nothing.
            wanted: request.wanted_outputs().unwrap_or_default(),
            rows: rows.collect(),
            request,
            call,
            arrival_ns,
            started_ns: None,
            num_responses: 0,
            counted_in: None,
        }
    }

    /// Counts it here until it is dropped.
    pub(crate) fn count_in(&mut self, open: &Arc<AtomicUsize>) {
        open.fetch_add(1, Ordering::Relaxed);
        self.counted_in = Some(Arc::clone(open));
    }

    /// What is to be computed, a row each, on this level of priority.
    pub(crate) fn take_requests(&mut self, level: u32) -> Vec<spec_core::runtime::Request> {
        let num_rows = self.call.rows.len();
        let take = |(idx, row): (usize, &mut Row)| {
            let request = std::mem::take(&mut row.request);
            spec_core::runtime::Request { priority: level, row: idx, num_rows, ..request }
        };
        self.call.rows.iter_mut().enumerate().map(take).collect()
    }

    pub(crate) fn num_rows(&self) -> usize {
        self.rows.len()
    }

    /// A step took part of it for the first time.
    pub(crate) fn start(&mut self, at: u64) {
        self.started_ns = Some(at);
    }

    /// Takes in what a step brought to a row, and sends what can be sent. An error has been told to the
    /// client; nothing is to follow.
    pub(crate) fn progress(
        &mut self,
        row_idx: usize,
        emitted: Vec<Emitted>,
        ending: Option<Ending>,
        at: u64,
        home: &Home<'_>,
    ) -> Result<Outcome, Error> {
        let row = &mut self.rows[row_idx];
        row.times.arrival_ns = self.arrival_ns;
        row.times.first_scheduled_ns = self.started_ns.unwrap_or(at);
        let end_token = match &ending {
            Some(Ending { outcome: Ok(FinishReason::Stop(token)), .. }) => Some(*token),
            _ => None,
        };
        let met = row.take(emitted, end_token, at, home)?;
        if let Some(ending) = ending {
            home.model.metrics.count_drafts(&ending.counters);
            row.end(ending)?;
            home.model.metrics.count_row(self.call.rows[row_idx].prompt_len, row.num_tokens);
        }
        let done = self.rows.iter().all(|row| row.ended);
        self.respond(row_idx, done, home)?;
        Ok(match (done, met) {
            (true, _) => Outcome::Done,
            (false, true) => Outcome::RowStopped,
            (false, false) => Outcome::Open,
        })
    }

    /// Sends what has come, if it is time to.
    fn respond(&mut self, row_idx: usize, done: bool, home: &Home<'_>) -> Result<(), Error> {
        let row = &self.rows[row_idx];
        let sends = done || (self.call.streams && row.is_settled() && row.has_news(home.profile()));
        if !sends {
            return Ok(());
        }
        let start = monotonic_ns();
        let rows = match self.call.streams {
            true => vec![self.rows[row_idx].reply()],
            false => self.rows.iter_mut().map(Progress::reply).collect(),
        };
        let mut outputs = home.outputs(&self.call, rows);
        outputs.retain(|output| self.wanted.is_empty() || self.wanted.contains(&output.name));
        let output_start = monotonic_ns();
        self.request.send(&outputs, done)?;
        let times = ResponseTimes { start, output_start, end: monotonic_ns() };
        self.count_response(times, done, None, home);
        Ok(())
    }

    fn count_response(
        &mut self,
        times: ResponseTimes,
        is_final: bool,
        error: Option<&Error>,
        home: &Home<'_>,
    ) {
        self.num_responses += 1;
        let counts = match home.model.settings.response_statistics {
            ResponseStatistics::Off => false,
            ResponseStatistics::Ends => is_final || self.num_responses == 1,
            ResponseStatistics::All => true,
        };
        if counts {
            // Fails only when the instance is gone, and then there is nobody to count for.
            let _ = home.instance.report_response(&self.request, times, error);
        }
    }

    /// Ends it with an error, unless its final response is out.
    pub(crate) fn fail(&mut self, error: &Error, home: &Home<'_>) {
        if !self.request.is_answered() {
            let start = monotonic_ns();
            self.request.fail(error);
            let times = ResponseTimes { start, output_start: 0, end: monotonic_ns() };
            self.count_response(times, true, Some(error), home);
        }
        self.report(false, home);
    }

    /// Ends it without any output.
    pub(crate) fn finish_empty(mut self, home: &Home<'_>) {
        let sent = self.request.send(&[], true);
        self.report_statistics(sent.is_ok(), home);
    }

    /// Reports its statistics, once its final response is out.
    pub(crate) fn report(&self, success: bool, home: &Home<'_>) {
        let now = self.report_statistics(success, home);
        if success {
            let rows = self.rows.iter().map(|row| (row.times, row.num_tokens));
            home.model.metrics.count_request(self.arrival_ns, now, rows);
        }
    }

    /// Reports to Triton and tells the time.
    fn report_statistics(&self, success: bool, home: &Home<'_>) -> u64 {
        let now = monotonic_ns();
        let start = self.started_ns.unwrap_or(now);
        // A row that was stopped before its first token has no last one.
        let last_token = self.rows.iter().map(|row| row.times.last_token_ns).max().unwrap_or(now);
        let times = triton::Times {
            exec_start: start,
            compute_start: start,
            compute_end: last_token.max(start),
            exec_end: now,
        };
        // Fails only when the instance is gone.
        let _ = home.instance.report(&self.request, success, times);
        now
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(open) = &self.counted_in {
            open.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Where a ticket is at home.
#[derive(Clone, Copy)]
pub(crate) struct Home<'a> {
    pub(crate) model: &'a Model,
    pub(crate) instance: &'a Instance,
}

impl Home<'_> {
    fn outputs(&self, call: &Call, rows: Vec<RowReply>) -> Vec<Tensor> {
        self.model.contract.outputs(call, &Reply { rows }, self.tokenizer())
    }

    fn tokenizer(&self) -> &Tokenizer {
        &self.model.folder.tokenizer
    }

    /// Text that the tokenizer gave.
    fn read(&self, chunk: spec_core::Result<TextChunk>) -> Result<TextChunk, Error> {
        chunk.map_err(|error| self.model.contract.error(error))
    }

    fn profile(&self) -> Profile {
        self.model.contract.profile
    }
}

impl Progress {
    fn new(row_idx: usize, row: &Row) -> Self {
        Self {
            text: TextStream::new(&TextRules {
                stops: row.stops.clone().into(),
                ..TextRules::default()
            }),
            next: RowReply { row_idx, is_first: true, ..RowReply::default() },
            num_tokens: 0,
            stop_sequences: StopSequences::new(&row.stop_sequences),
            stopped: false,
            ended: false,
            times: Times::default(),
        }
    }

    /// Takes in tokens, and tells whether one of them met a stop word. The one that ended the sequence is no
    /// text, special or not.
    fn take(
        &mut self,
        emitted: Vec<Emitted>,
        end_token: Option<u32>,
        at: u64,
        home: &Home<'_>,
    ) -> Result<bool, Error> {
        let last = emitted.len().saturating_sub(1);
        for (idx, emitted) in emitted.into_iter().enumerate() {
            if self.stopped {
                break;
            }
            let chunk = match idx == last && end_token == Some(emitted.token) {
                true => TextChunk::default(),
                false => home.read(self.text.push(home.tokenizer(), emitted.token))?,
            };
            self.next.text.push_str(&chunk.text);
            self.num_tokens += 1;
            self.times.last_token_ns = at;
            if self.num_tokens == 1 {
                self.times.first_token_ns = at;
            }
            self.stopped = chunk.stopped | self.stop_sequences.push(emitted.token);
            self.next.cum_log_prob += f64::from(emitted.logprob.unwrap_or(0.0));
            self.next.emitted.push(emitted);
        }
        Ok(self.stopped && !self.ended)
    }

    fn end(&mut self, ending: Ending) -> Result<(), Error> {
        // A text that has met a stop word is whole, whatever happened after.
        let mut reason = FinishReason::StopWord;
        if !self.stopped {
            reason = ending.outcome?;
            let chunk = self.text.finish();
            self.next.text.push_str(&chunk.text);
            if chunk.stopped {
                reason = FinishReason::StopWord;
            }
        }
        self.ended = true;
        self.next.finish = Some(Finish {
            reason,
            pages_new: ending.counters.new_pages as usize,
            pages_reused: ending.counters.reused_pages as usize,
            counters: ending.counters,
            times: self.times,
        });
        Ok(())
    }

    /// Whether it is not on its way out: a row that has met its stop word waits for its ending, which goes with its
    /// last text.
    fn is_settled(&self) -> bool {
        !self.stopped || self.ended
    }

    /// Whether there is something to show to a client that streams.
    fn has_news(&self, profile: Profile) -> bool {
        let next = &self.next;
        match profile {
            Profile::Token => !next.emitted.is_empty() || next.finish.is_some(),
            Profile::Text | Profile::Vllm => !next.text.is_empty() || next.finish.is_some(),
        }
    }

    /// What the next response carries; what comes later goes into the one after it.
    fn reply(&mut self) -> RowReply {
        let rest = RowReply {
            row_idx: self.next.row_idx,
            cum_log_prob: self.next.cum_log_prob,
            ..RowReply::default()
        };
        std::mem::replace(&mut self.next, rest)
    }
}
