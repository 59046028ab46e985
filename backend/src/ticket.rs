//! A request that was taken on, from its first token to its last response. It alone touches the request's
//! objects of Triton's. One way out: final response, statistics, release.

use crate::contract::{Call, PromptLogProbs, Reply, Row, RowReply, StopSequences, Times};
use crate::mailbox::TicketId;
use crate::model::Model;
use crate::parameters::ResponseStatistics;
use crate::responder::Gain;
use spec_core::runtime::{Emitted, FinishReason, TextChunk, TextStream};
use spec_core::tokenizer::Tokenizer;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use triton_backend::{Error, Instance, Request, ResponseTimes, Tensor, monotonic_ns};

/// A request that was taken on.
pub(crate) struct Ticket {
    pub(crate) id: TicketId,
    /// The client's name for it.
    pub(crate) request_id: String,
    request: Request,
    call: Call,
    /// Names of the outputs that the client wants.
    wanted: Vec<String>,
    /// Those of a row one after the other.
    sequences: Vec<Progress>,
    prompt_log_probs: PromptLogProbs,
    arrival_ns: u64,
    started_ns: Option<u64>,
    num_responses: usize,
    /// Counts it among the open requests of its instance.
    counted_in: Option<Arc<AtomicUsize>>,
}

/// How far a sequence is.
struct Progress {
    /// `None` where the tokens alone are wanted.
    text: Option<TextStream>,
    /// The token that ends it is text too.
    includes_stop: bool,
    /// What the next response carries.
    next: RowReply,
    num_tokens: usize,
    stop_sequences: StopSequences,
    /// A stop word was met: later tokens do not count.
    stopped: bool,
}

/// What became of a ticket with some updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It goes on.
    Open,
    /// A sequence has met a stop word: the engine need not go on with it.
    Stopped,
    /// The client has its last response.
    Done,
}

impl Ticket {
    /// A request that arrived at `arrival_ns`, as it was read.
    pub(crate) fn new(id: TicketId, request: Request, call: Call, arrival_ns: u64) -> Self {
        let drawn = call.fan_out.drawn;
        let texts = texts(&call.rows);
        let of_row = |(row_idx, (row, text))| {
            (0..drawn).map(move |sequence_idx| Progress::new(row_idx, sequence_idx, row, text))
        };
        let rows = call.rows.iter().zip(&texts).enumerate();
        let sequences: Vec<Progress> = rows.flat_map(of_row).collect();
        Self {
            id,
            request_id: request.id(),
            // Without an answer everything is wanted, as if the client had named nothing.
            wanted: request.wanted_outputs().unwrap_or_default(),
            sequences,
            prompt_log_probs: PromptLogProbs::default(),
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

    /// What is to be computed, a sequence each, on this level of priority.
    pub(crate) fn take_requests(&mut self, level: u32) -> Vec<spec_core::runtime::Request> {
        let (fan_out, num_rows) = (self.call.fan_out, self.sequences.len());
        let taken = self.call.rows.iter_mut().map(|row| std::mem::take(&mut row.request));
        let requests = taken.flat_map(|request| fan_out.requests(request)).enumerate();
        let numbered = requests.map(|(row, request)| spec_core::runtime::Request {
            priority: level,
            row,
            num_rows,
            ..request
        });
        numbered.collect()
    }

    pub(crate) fn num_sequences(&self) -> usize {
        self.sequences.len()
    }

    /// A step took part of it for the first time.
    pub(crate) fn start(&mut self, at: u64) {
        self.started_ns = Some(at);
    }

    /// Takes in what a sequence has gained, and sends what can be sent. An error has been told to the client;
    /// nothing is to follow.
    pub(crate) fn progress(
        &mut self,
        idx: usize,
        gain: Gain,
        owner: &Owner<'_>,
    ) -> Result<Outcome, Error> {
        let Gain { prompt, emitted, counters, ending, at } = gain;
        self.prompt_log_probs.push(&prompt, owner.tokenizer());
        let sequence = &mut self.sequences[idx];
        let times = &mut sequence.next.times;
        times.arrival_ns = self.arrival_ns;
        times.first_scheduled_ns = self.started_ns.unwrap_or(at);
        sequence.next.counters = counters;
        let end_token = match &ending {
            Some(Ok(FinishReason::Stop(token))) => Some(*token),
            _ => None,
        };
        let met = sequence.take(emitted, end_token, at, owner)?;
        if let Some(outcome) = ending {
            let metrics = &owner.model.metrics;
            sequence.end(outcome)?;
            metrics.count_text(sequence.num_tokens);
            if idx.is_multiple_of(self.call.fan_out.drawn) {
                metrics.count_prompt(self.call.rows[sequence.next.row_idx].prompt_len);
            }
        }
        let done = self.sequences.iter().all(Progress::has_ended);
        self.respond(idx, done, owner)?;
        Ok(match (done, met) {
            (true, _) => Outcome::Done,
            (false, true) => Outcome::Stopped,
            (false, false) => Outcome::Open,
        })
    }

    /// Sends what has come, if it is time to.
    fn respond(&mut self, idx: usize, done: bool, owner: &Owner<'_>) -> Result<(), Error> {
        let each = owner.model.contract.answers_each(&self.call);
        let sequence = &mut self.sequences[idx];
        let sends = match (self.call.streams, each) {
            (true, _) => sequence.is_settled() && sequence.has_news(),
            (false, true) => sequence.has_ended(),
            (false, false) => done,
        };
        if !sends {
            return Ok(());
        }
        let start = monotonic_ns();
        let rows = if each { vec![sequence.reply()] } else { self.replies() };
        let prompt_log_probs = match self.call.report.prompt_log_probs {
            true => self.prompt_log_probs.json(),
            false => String::new(),
        };
        let mut outputs = owner.outputs(&self.call, &Reply { rows, prompt_log_probs });
        outputs.retain(|output| self.wanted.is_empty() || self.wanted.contains(&output.name));
        let output_start = monotonic_ns();
        self.request.send(&outputs, done)?;
        let times = ResponseTimes { start, output_start, end: monotonic_ns() };
        self.count_response(times, done, None, owner);
        Ok(())
    }

    /// What is new in all sequences that are answered.
    fn replies(&mut self) -> Vec<RowReply> {
        let fan_out = self.call.fan_out;
        let rows = self.sequences.chunks_mut(fan_out.drawn);
        let replies = rows.map(|row| row.iter_mut().map(Progress::reply).collect());
        replies.flat_map(|of_row| fan_out.choose(of_row)).collect()
    }

    fn count_response(
        &mut self,
        times: ResponseTimes,
        is_final: bool,
        error: Option<&Error>,
        owner: &Owner<'_>,
    ) {
        self.num_responses += 1;
        let counts = match owner.model.settings.response_statistics {
            ResponseStatistics::Off => false,
            ResponseStatistics::Ends => is_final || self.num_responses == 1,
            ResponseStatistics::All => true,
        };
        if counts {
            // Fails only when the instance is gone, and then there is nobody to count for.
            let _ = owner.instance.report_response(&self.request, times, error);
        }
    }

    /// Ends it with an error, unless its final response is out.
    pub(crate) fn fail(&mut self, error: &Error, owner: &Owner<'_>) {
        if !self.request.is_answered() {
            let start = monotonic_ns();
            self.request.fail(error);
            let times = ResponseTimes { start, output_start: 0, end: monotonic_ns() };
            self.count_response(times, true, Some(error), owner);
        }
        self.report(false, owner);
    }

    /// Ends it without any output.
    pub(crate) fn finish_empty(mut self, owner: &Owner<'_>) {
        let sent = self.request.send(&[], true);
        self.report_statistics(sent.is_ok(), owner);
    }

    /// Reports its statistics, once its final response is out.
    pub(crate) fn report(&self, success: bool, owner: &Owner<'_>) {
        let now = self.report_statistics(success, owner);
        if success {
            let texts = self.sequences.iter().map(|one| (one.next.times, one.num_tokens));
            owner.model.metrics.count_request(self.arrival_ns, now, texts);
        }
    }

    /// Reports to Triton and tells the time.
    fn report_statistics(&self, success: bool, owner: &Owner<'_>) -> u64 {
        let now = monotonic_ns();
        self.request.trace(|| self.activities());
        let start = self.started_ns.unwrap_or(now);
        // One that was stopped before its first token has no last one.
        let last_tokens = self.sequences.iter().map(|one| one.next.times.last_token_ns);
        let last_token = last_tokens.max().unwrap_or(now);
        let times = triton_backend::Times {
            exec_start: start,
            compute_start: start,
            compute_end: last_token.max(start),
            exec_end: now,
        };
        // Fails only when the instance is gone.
        let _ = owner.instance.report(&self.request, success, times);
        now
    }
}

/// What a trace tells of a request: its phases, and what speculation did for it.
impl Ticket {
    fn activities(&self) -> Vec<(String, u64)> {
        let of = |time: fn(&Times) -> u64| {
            self.sequences.iter().map(move |one| time(&one.next.times)).filter(|&at| at > 0)
        };
        let first_token = of(|times| times.first_token_ns).min();
        let last_token = of(|times| times.last_token_ns).max();
        let phases = [
            ("SPEC_QUEUE", Some(self.arrival_ns), self.started_ns),
            ("SPEC_PREFILL", self.started_ns, first_token),
            ("SPEC_DECODE", first_token, last_token),
        ];
        let mut activities = Vec::new();
        for (name, start, end) in phases {
            let Some((start, end)) = start.zip(end) else { break };
            activities.extend([(format!("{name}_START"), start), (format!("{name}_END"), end)]);
        }
        if let Some(at) = last_token {
            let sum = |count: fn(&Progress) -> u64| self.sequences.iter().map(count).sum::<u64>();
            let tokens = sum(|one| one.num_tokens as u64);
            let drafted = sum(|one| one.next.counters.drafted);
            let accepted = sum(|one| one.next.counters.accepted);
            activities
                .push((format!("SPEC tokens={tokens} drafted={drafted} accepted={accepted}"), at));
        }
        activities
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(open) = &self.counted_in {
            open.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// The model and the instance that a ticket is of.
#[derive(Clone, Copy)]
pub(crate) struct Owner<'a> {
    pub(crate) model: &'a Model,
    pub(crate) instance: &'a Instance,
}

impl Owner<'_> {
    fn outputs(&self, call: &Call, reply: &Reply) -> Vec<Tensor> {
        self.model.contract.outputs(call, reply, self.tokenizer())
    }

    fn tokenizer(&self) -> &Tokenizer {
        &self.model.folder.tokenizer
    }

    /// Text that the tokenizer gave.
    fn read(&self, chunk: spec_core::Result<TextChunk>) -> Result<TextChunk, Error> {
        chunk.map_err(|error| self.model.contract.error(error))
    }
}

/// The text of each row at its start. Stop strings take several times their bytes: rows that look for the same share them.
fn texts(rows: &[Row]) -> Vec<Option<TextStream>> {
    let mut texts: Vec<Option<TextStream>> = Vec::with_capacity(rows.len());
    for (idx, row) in rows.iter().enumerate() {
        let same = idx.checked_sub(1).filter(|&before| rows[before].rules == row.rules);
        texts.push(match same {
            Some(before) => texts[before].clone(),
            None => row.rules.as_ref().map(TextStream::new),
        });
    }
    texts
}

impl Progress {
    fn new(row_idx: usize, sequence_idx: usize, row: &Row, text: &Option<TextStream>) -> Self {
        Self {
            text: text.clone(),
            includes_stop: row.rules.as_ref().is_some_and(|rules| rules.includes_stop),
            next: RowReply { row_idx, sequence_idx, is_first: true, ..RowReply::default() },
            num_tokens: 0,
            stop_sequences: StopSequences::new(&row.stop_sequences, row.min_tokens),
            stopped: false,
        }
    }

    /// Takes in tokens, and tells whether one of them met a stop word. The one that ended the sequence is text only
    /// where stop strings are.
    fn take(
        &mut self,
        emitted: Vec<Emitted>,
        end_token: Option<u32>,
        at: u64,
        owner: &Owner<'_>,
    ) -> Result<bool, Error> {
        let last = emitted.len().saturating_sub(1);
        for (idx, emitted) in emitted.into_iter().enumerate() {
            if self.stopped {
                break;
            }
            let is_hidden = idx == last && end_token == Some(emitted.token) && !self.includes_stop;
            let chunk = match &mut self.text {
                Some(text) if !is_hidden => {
                    owner.read(text.push(owner.tokenizer(), emitted.token))?
                }
                _ => TextChunk::default(),
            };
            let next = &mut self.next;
            next.text.push_str(&chunk.text);
            self.num_tokens += 1;
            next.times.last_token_ns = at;
            if self.num_tokens == 1 {
                next.times.first_token_ns = at;
            }
            self.stopped = chunk.stopped | self.stop_sequences.push(emitted.token);
            next.cum_log_prob += f64::from(emitted.logprob.unwrap_or(0.0));
            next.emitted.push(emitted);
        }
        Ok(self.stopped && !self.has_ended())
    }

    fn end(&mut self, outcome: Result<FinishReason, Error>) -> Result<(), Error> {
        // A text that has met a stop word is whole, whatever happened after.
        let mut reason = FinishReason::StopWord;
        if !self.stopped {
            reason = outcome?;
            let chunk = self.text.as_mut().map(TextStream::finish).unwrap_or_default();
            self.next.text.push_str(&chunk.text);
            if chunk.stopped {
                reason = FinishReason::StopWord;
            }
        }
        self.next.finish = Some(reason);
        Ok(())
    }

    fn has_ended(&self) -> bool {
        self.next.finish.is_some()
    }

    /// Whether it is not on its way out: one that has met its stop word waits for its ending, which goes with its
    /// last text.
    fn is_settled(&self) -> bool {
        !self.stopped || self.has_ended()
    }

    /// Whether there is something to show to a client that streams.
    fn has_news(&self) -> bool {
        let next = &self.next;
        let has_output = match self.text {
            Some(_) => !next.text.is_empty(),
            None => !next.emitted.is_empty(),
        };
        has_output || self.has_ended()
    }

    /// What the next response carries; what comes later goes into the one after it.
    fn reply(&mut self) -> RowReply {
        let reply = std::mem::take(&mut self.next);
        self.next = RowReply {
            row_idx: reply.row_idx,
            sequence_idx: reply.sequence_idx,
            cum_log_prob: reply.cum_log_prob,
            counters: reply.counters.clone(),
            times: reply.times,
            finish: reply.finish,
            ..RowReply::default()
        };
        reply
    }
}
