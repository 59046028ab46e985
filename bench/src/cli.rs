//! The command line.

use crate::endpoint::Address;
use crate::setting::{Load, Setting};
use anyhow::{Result, ensure};
use clap::{Args, Parser, Subcommand};
use spec_build::cli::DraftLen;
use spec_core::runtime::Lookup;
use std::path::PathBuf;

/// Measures what speculation brings.
///
/// An ENDPOINT is a model folder, which is run in this process, or `triton://HOST:PORT/MODEL` (gRPC), or
/// `openai://HOST:PORT/MODEL` (HTTP); over TLS with `triton+https` or `openai+https`.
#[derive(Debug, Parser)]
#[command(name = "spec-bench", version)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measures each combination of what is given, as it is.
    Run {
        /// Where to ask.
        #[arg(required = true, value_name = "ENDPOINT")]
        endpoints: Vec<String>,
        /// Draft tokens a step, `auto` among them; 0 is without drafts.
        #[arg(long, value_delimiter = ',', default_value = "auto")]
        draft_len: Vec<DraftLen>,
        /// How.
        #[command(flatten)]
        asking: Asking,
    },
    /// Measures draft lengths and loads against decoding without drafts.
    Sweep {
        /// Where to ask.
        #[arg(required = true, value_name = "ENDPOINT")]
        endpoints: Vec<String>,
        /// Draft tokens a step, beside none.
        #[arg(long, value_delimiter = ',', default_value = "auto,1,2,4,8")]
        draft_len: Vec<DraftLen>,
        /// How.
        #[command(flatten)]
        asking: Asking,
    },
    /// Measures endpoints in turn, each as it is and, where it can be chosen, without drafts.
    Compare {
        /// Where to ask.
        #[arg(required = true, num_args = 1.., value_name = "ENDPOINT")]
        endpoints: Vec<String>,
        /// How.
        #[command(flatten)]
        asking: Asking,
    },
    /// Draws the report of results that were measured earlier.
    Report {
        /// What `--json` wrote.
        results: PathBuf,
        /// Where to write the report.
        #[arg(long, value_name = "FILE")]
        html: PathBuf,
    },
}

/// How endpoints are asked.
#[derive(Debug, Args)]
pub struct Asking {
    /// Prompts, one a line: text, or JSON with `messages`, `turns` (Spec-Bench), `prompt` (HumanEval) or `prompt_ids`; may be
    /// repeated [default: 30 built-in prompts of several kinds].
    #[arg(long, value_name = "FILE")]
    pub prompts: Vec<PathBuf>,
    /// Prompts that are asked at most, evenly from all.
    #[arg(long, default_value_t = 64)]
    pub num_prompts: usize,
    /// Take prompts as they are, without the model's chat template.
    #[arg(long)]
    pub raw: bool,
    /// New tokens of an answer at most.
    #[arg(long, default_value_t = 128)]
    pub max_tokens: usize,
    /// Go on after the model's end tokens, so that all answers are as long.
    #[arg(long)]
    pub ignore_eos: bool,
    /// Requests at a time.
    #[arg(long, value_delimiter = ',', default_value = "1", conflicts_with = "rate")]
    pub concurrency: Vec<usize>,
    /// Requests a second, whatever has ended, at random times.
    #[arg(long, value_delimiter = ',')]
    pub rate: Vec<f64>,
    /// 0 takes the likeliest token; else answers are drawn, with a seed each.
    #[arg(long, value_delimiter = ',', default_value = "0")]
    pub temperature: Vec<f32>,
    /// Where an engine in this process looks drafts up: off, ngram or suffix [default: as it was built].
    #[arg(long, value_delimiter = ',')]
    pub lookup: Vec<Lookup>,
    /// Requests of each measurement [default: as many as prompts].
    #[arg(long)]
    pub requests: Option<usize>,
    /// Requests ahead of each measurement, which count for nothing.
    #[arg(long, default_value_t = 2)]
    pub warm_up: usize,
    /// Times that everything is measured, in turn.
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
    /// Threads of an engine in this process [default: one a physical core].
    #[arg(long)]
    pub threads: Option<usize>,
    /// Write everything that was measured.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write a report with plots, one file that needs nothing else.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Show nothing but the results.
    #[arg(long)]
    pub quiet: bool,
}

impl Command {
    /// What is to be measured and how; nothing for `report`.
    pub fn measures(&self) -> Result<Option<(Vec<Setting>, &Asking)>> {
        let (endpoints, draft_len, asking) = match self {
            Self::Run { endpoints, draft_len, asking } => (endpoints, draft_len.clone(), asking),
            Self::Sweep { endpoints, draft_len, asking } => {
                let plain = DraftLen::Fixed(0);
                let others = draft_len.iter().copied().filter(|&len| len != plain);
                (endpoints, std::iter::once(plain).chain(others).collect(), asking)
            }
            Self::Compare { endpoints, asking } => {
                (endpoints, vec![DraftLen::Fixed(0), DraftLen::Auto], asking)
            }
            Self::Report { .. } => return Ok(None),
        };
        asking.check()?;
        let mut settings = Vec::new();
        for endpoint in endpoints {
            let address: Address = endpoint.parse().map_err(anyhow::Error::msg)?;
            for load in asking.loads() {
                for &temperature in &asking.temperature {
                    let of = |draft_len, lookup| Setting {
                        endpoint: endpoint.clone(),
                        draft_len,
                        lookup,
                        load,
                        temperature,
                    };
                    settings.extend(ways(&address, &draft_len, &asking.lookup, of));
                }
            }
        }
        Ok(Some((settings, asking)))
    }
}

/// Draft lengths and look-ups of one endpoint, each once.
fn ways(
    address: &Address,
    draft_len: &[DraftLen],
    lookups: &[Lookup],
    setting: impl Fn(DraftLen, Option<Lookup>) -> Setting,
) -> Vec<Setting> {
    if !address.takes_draft_len() {
        return vec![setting(DraftLen::Auto, None)];
    }
    let mut settings = Vec::new();
    for &len in draft_len {
        match len {
            DraftLen::Fixed(0) => settings.push(setting(len, None)),
            _ if lookups.is_empty() => settings.push(setting(len, None)),
            _ => settings.extend(lookups.iter().map(|&lookup| setting(len, Some(lookup)))),
        }
    }
    settings
}

impl Asking {
    fn loads(&self) -> Vec<Load> {
        match self.rate.is_empty() {
            true => self.concurrency.iter().copied().map(Load::Concurrency).collect(),
            false => self.rate.iter().copied().map(Load::Rate).collect(),
        }
    }

    fn check(&self) -> Result<()> {
        ensure!(self.rounds > 0, "--rounds 0: expected at least 1");
        ensure!(self.num_prompts > 0, "--num-prompts 0: expected at least 1");
        ensure!(self.max_tokens > 0, "--max-tokens 0: expected at least 1");
        ensure!(self.requests != Some(0), "--requests 0: expected at least 1");
        ensure!(!self.concurrency.contains(&0), "--concurrency 0: expected at least 1");
        if let Some(rate) = self.rate.iter().find(|rate| !(rate.is_finite() && **rate > 0.0)) {
            anyhow::bail!("--rate {rate}: expected more than 0");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(line: &str) -> Result<Vec<Setting>> {
        let words = std::iter::once("spec-bench").chain(line.split(' '));
        Ok(Cli::try_parse_from(words)?.command.measures()?.expect("it measures").0)
    }

    #[test]
    fn the_command_line_is_well_formed() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn a_sweep_has_each_length_and_none_once() {
        let settings = settings("sweep model --draft-len auto,0,4 --concurrency 1,8").unwrap();
        let drafts: Vec<String> = settings.iter().map(Setting::drafts).collect();
        assert_eq!(drafts, ["off", "auto", "K=4", "off", "auto", "K=4"]);
        assert!(settings[3..].iter().all(|setting| setting.load == Load::Concurrency(8)));
    }

    #[test]
    fn what_cannot_be_chosen_is_measured_once() {
        let settings =
            settings("compare model openai://localhost:1/m --lookup off,suffix").unwrap();
        let ways: Vec<(String, String)> =
            settings.iter().map(|setting| (setting.endpoint.clone(), setting.drafts())).collect();
        let expected = [
            ("model", "off"),
            ("model", "auto, off look-up"),
            ("model", "auto, suffix look-up"),
            ("openai://localhost:1/m", "auto"),
        ];
        assert_eq!(ways, expected.map(|(a, b)| (a.to_string(), b.to_string())));
    }

    #[test]
    fn impossible_loads_are_named() {
        for (line, what) in [
            ("run model --rate 0", "--rate 0: expected more than 0"),
            ("run model --concurrency 0", "--concurrency 0: expected at least 1"),
            ("run http://here/model", "expected DIR, triton://"),
        ] {
            let error = settings(line).unwrap_err().to_string();
            assert!(error.starts_with(what), "{error}");
        }
    }
}
