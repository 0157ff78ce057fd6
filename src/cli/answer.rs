//! A conversation on the engine: messages to tokens, tokens to text as they come.

use std::fmt;

use crate::app::power::EnergyWatch;
use crate::app::{App, Interrupts, Text};
use crate::engine::{Budget, Done, Event, Request, SeqId, Stats};
use crate::power::types::Phase;
use crate::sample::{SampleParams, Sampled, Sampler};
use crate::text::template::Chat as Messages;
use crate::text::{Detokenizer, StopStrings};
use crate::units::{Result, TokenId};

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The model ended it.
    Stop,
    /// A stop string was met.
    StopString,
    /// The most tokens asked for.
    Length,
    /// The context is full.
    Context,
    /// Ctrl-C.
    Interrupted,
}

impl fmt::Display for Finish {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Finish::Stop => "stop",
            Finish::StopString => "stop string",
            Finish::Length => "length",
            Finish::Context => "context full",
            Finish::Interrupted => "interrupted",
        })
    }
}

/// One answer.
#[derive(Debug)]
pub struct Answer {
    /// Its text, without what ended it.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<Sampled>,
    /// Why it ended.
    pub finish: Finish,
    /// Times and counts.
    pub stats: Stats,
    /// What it took of the board's energy in mJ, where that is measured: reading, generating, and how it is measured.
    pub energy: Option<(f64, f64, &'static str)>,
}

/// A conversation.
pub struct Chat {
    /// The loaded model.
    pub app: App,
    /// Continue plain text, without the template.
    pub raw: bool,
    /// Texts that end an answer.
    pub stops: Vec<String>,
    /// Show control tokens.
    pub show_special: bool,
    /// Prompt tokens of a step.
    pub prefill_chunk: usize,
    /// How long loading took.
    pub load_seconds: f64,
    /// The board's energy, where it is measured.
    pub meter: Option<EnergyWatch>,
    text: Text,
    params: SampleParams,
    max_new: usize,
    /// (role, content), in order.
    messages: Vec<(String, String)>,
    /// The last answer's sequence: the next prompt begins with its tokens.
    last: Option<SeqId>,
}

impl Chat {
    /// An empty conversation.
    pub fn new(app: App, text: Text, mut params: SampleParams, max_new: usize) -> Chat {
        // DRY does not reach over these: repeating a list's bullets or a dialogue's quotes is no repetition.
        if params.dry_multiplier > 0.0 {
            let spelled = |s: &str| text.tokenizer.sequences_with(s).unwrap_or_default();
            params.dry_breakers = ["\n", ":", "\"", "*"].into_iter().flat_map(spelled).collect();
        }
        Chat {
            app,
            raw: false,
            stops: Vec::new(),
            show_special: false,
            prefill_chunk: 512,
            load_seconds: 0.0,
            meter: None,
            text,
            params,
            max_new,
            messages: Vec::new(),
            last: None,
        }
    }

    /// Adds a message.
    pub fn say(&mut self, role: &str, content: &str) {
        self.messages.push((role.to_owned(), content.to_owned()));
    }

    /// Adds an answer as the assistant's message.
    pub fn hear(&mut self, answer: &Answer) {
        self.say("assistant", &answer.text);
    }

    /// Takes the last message back.
    pub fn forget_last(&mut self) {
        self.messages.pop();
    }

    /// The seed in use.
    pub fn seed(&self) -> u64 {
        self.params.seed
    }

    /// Whether the likeliest tokens were asked for.
    pub fn wants_logprobs(&self) -> bool {
        self.params.logprobs.is_some()
    }

    /// The conversation as tokens, ready for an answer. Without a template it is the messages' text, one a line.
    fn prompt(&self) -> Result<Vec<TokenId>> {
        let tokenizer = &self.text.tokenizer;
        match self.text.template.as_ref().filter(|_| !self.raw) {
            // The template writes the special tokens, BOS included.
            Some(template) => {
                let messages = Messages::of(self.messages.iter().map(|(r, c)| (r.as_str(), c.as_str())));
                tokenizer.encode(&template.render(tokenizer, &messages)?, true, false)
            }
            None => {
                let lines: Vec<&str> = self.messages.iter().map(|(_, content)| content.as_str()).collect();
                tokenizer.encode(&lines.join("\n"), true, true)
            }
        }
    }

    /// Generates the next message; `show` gets its text in pieces that are whole characters.
    pub fn answer(
        &mut self,
        interrupts: &Interrupts,
        show: &mut dyn FnMut(&str) -> Result<()>,
    ) -> Result<Answer> {
        let prompt = self.prompt()?;
        let mut sampler = Sampler::new(self.params.clone())?;
        // Penalties see the prompt too.
        prompt.iter().for_each(|&t| sampler.accept(t));
        let end_ids = self.text.tokenizer.end_ids().to_vec();
        let request = Request::new(prompt, sampler, self.max_new, end_ids);
        // A prompt that is refused leaves the last sequence as it was.
        let seq = self.app.engine.open(request, self.last)?;
        self.last = None;
        interrupts.begin();
        let made = self.generate(seq, interrupts, show);
        interrupts.end();
        match made {
            Ok(answer) => {
                self.last = Some(seq);
                Ok(answer)
            }
            Err(e) => {
                self.app.engine.close(seq);
                Err(e)
            }
        }
    }

    fn generate(
        &mut self,
        seq: SeqId,
        interrupts: &Interrupts,
        show: &mut dyn FnMut(&str) -> Result<()>,
    ) -> Result<Answer> {
        let budget = Budget { prefill_chunk: self.prefill_chunk, ..Budget::default() };
        let mut detokenizer = Detokenizer::new(!self.show_special);
        let mut stops = StopStrings::new(self.stops.clone())?;
        let (mut text, mut tokens, mut finish) = (String::new(), Vec::new(), None);
        let before = self.enter(Phase::Prefill);
        while finish.is_none() {
            if interrupts.stopped() {
                finish = Some(Finish::Interrupted);
                break;
            }
            for event in self.app.engine.step(&budget)? {
                match event {
                    Event::Prefilled { .. } | Event::Embedding { .. } | Event::Failed { .. } => {}
                    Event::Token { sampled, .. } => {
                        let mut piece = String::new();
                        detokenizer.push(&self.text.tokenizer, sampled.token, &mut piece);
                        if tokens.is_empty() {
                            self.enter(Phase::Decode);
                        }
                        tokens.push(sampled);
                        let shown = text.len();
                        if stops.push(&piece, &mut text).is_some() {
                            finish = Some(Finish::StopString);
                        }
                        show(&text[shown..])?;
                    }
                    Event::Done { why, .. } => {
                        finish.get_or_insert(match why {
                            Done::End(_) | Done::Complete | Done::Stopped => Finish::Stop,
                            Done::Length => Finish::Length,
                            Done::Context => Finish::Context,
                            Done::Deadline => Finish::Interrupted,
                        });
                    }
                }
            }
        }
        let shown = text.len();
        if finish != Some(Finish::StopString) {
            // What was held back as a possible stop string or half a character is text after all.
            let mut rest = String::new();
            detokenizer.finish(&mut rest);
            stops.push(&rest, &mut text);
            stops.finish(&mut text);
        }
        show(&text[shown..])?;
        let stats = self.app.engine.stats(seq).unwrap_or_default();
        let after = self.enter(Phase::Idle);
        let energy = before.zip(after).zip(self.meter.as_ref());
        let energy = energy.map(|((b, a), meter)| (a.0 - b.0, a.1 - b.1, meter.method().text()));
        Ok(Answer { text, tokens, finish: finish.unwrap_or(Finish::Stop), stats, energy })
    }

    /// Tells the meter what comes, and reads it: energy of reading and of generating so far.
    fn enter(&self, phase: Phase) -> Option<(f64, f64)> {
        let meter = self.meter.as_ref()?;
        meter.phase(phase);
        let mj = |phase| meter.share(phase).energy_mj;
        Some((mj(Phase::Prefill), mj(Phase::Decode)))
    }
}
