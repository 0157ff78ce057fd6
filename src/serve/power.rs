//! What the server tells and takes of the board's power: `/v1/power`, its part of `/metrics`, and what a request took of the
//! board's energy. The program that wires the rooms gives the one who knows ([`Power`]); without one all of it is absent.

use super::Server;
use super::body::json as json_response;
use super::fail::Fail;
use super::fields::{Answered, Fields};
use super::generate::Usage;
use super::models::Lease;
use crate::engine::service::Metrics;
use crate::units::Result;
use axum::body::Body;
use axum::http::{Response, StatusCode};
use serde_json::{Value, json};
use std::sync::Arc;

/// One who knows the board, and who may steer it.
pub trait Power: Send + Sync + 'static {
    /// All that is known, with the counts of the engine in memory put in where it has its place.
    fn status(&self, served: Option<(String, Metrics)>) -> Value;
    /// Switches to a profile by name; says what came of it.
    fn set_profile(&self, name: &str) -> Result<String>;
    /// Switches the board's power mode; says what came of it.
    fn set_mode(&self, name: &str) -> Result<String>;
    /// The board's part of `/metrics`, rows of one name together; names are those of
    /// [`BOARD_METRICS`](super::BOARD_METRICS).
    fn gauges(&self) -> Vec<Gauge>;
    /// Energy of the module up to now, where it is measured.
    fn spent(&self) -> Option<Spent>;
    /// Takes what is to be told if the one who knows breaks: the daemon ends then.
    fn watch(&self, fatal: Box<dyn Fn(&str) + Send + Sync>);
}

/// A row of `/metrics`.
#[derive(Debug, Clone, PartialEq)]
pub struct Gauge {
    /// The metric.
    pub name: &'static str,
    /// Its labels.
    pub labels: Vec<(&'static str, String)>,
    /// Its value.
    pub value: f64,
}

/// Energy of the module up to a moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spent {
    /// While prompts were read, in mJ.
    pub prefill_mj: f64,
    /// While nothing but generating went on, in mJ.
    pub decode_mj: f64,
    /// One standard error of each, as a share of it, where they are estimated: the meter lags behind the phases.
    pub errors: Option<[f64; 2]>,
    /// How it is measured.
    pub method: &'static str,
}

/// What a request took of the board's energy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Energy {
    /// Reading its prompt, in mJ.
    pub prefill_mj: f64,
    /// Generating, in mJ.
    pub decode_mj: f64,
    /// As [`Spent::errors`].
    pub errors: Option<[f64; 2]>,
    /// How it was measured.
    pub method: &'static str,
}

/// What stood on the meters when a request began.
pub struct Bill {
    spent: Spent,
    read: u64,
    generated: u64,
}

impl Bill {
    /// Reads the meters; none where nothing measures.
    pub fn open(lease: &Lease) -> Option<Bill> {
        let spent = lease.power()?.spent()?;
        let m = lease.handle.metrics();
        Some(Bill { spent, read: m.prefill_tokens, generated: m.generated_tokens })
    }

    /// Reads them again. Of what each phase took meanwhile the request has the share that its tokens have of all: requests
    /// side by side divide one board, and what an idle board draws is no request's.
    pub fn close(&self, lease: &Lease, usage: &Usage) -> Option<Energy> {
        let now = lease.power()?.spent()?;
        let m = lease.handle.metrics();
        Some(self.share(&now, (m.prefill_tokens, m.generated_tokens), usage))
    }

    fn share(&self, now: &Spent, (read, generated): (u64, u64), usage: &Usage) -> Energy {
        // The engine counts a step after it has told its tokens: the request's own may be ahead.
        let part = |own: usize, before: u64, after: u64| {
            let all = after.saturating_sub(before).max(own as u64);
            if own == 0 { 0.0 } else { own as f64 / all as f64 }
        };
        Energy {
            prefill_mj: (now.prefill_mj - self.spent.prefill_mj).max(0.0) * part(usage.read, self.read, read),
            decode_mj: (now.decode_mj - self.spent.decode_mj).max(0.0)
                * part(usage.generated, self.generated, generated),
            errors: now.errors,
            method: now.method,
        }
    }
}

impl Energy {
    /// As it stands in a response's usage.
    pub fn shown(&self, generated: usize) -> Value {
        let tenth = |x: f64| (x * 10.0).round() / 10.0;
        let all_mj = self.prefill_mj + self.decode_mj;
        let a_token = (generated > 0).then(|| tenth(self.decode_mj / generated as f64));
        let errors = self.errors.map(|[prefill, decode]| {
            json!({ "prefill": tenth(self.prefill_mj * prefill), "decode": tenth(self.decode_mj * decode) })
        });
        json!({
            "energy_mj": {
                "prefill": tenth(self.prefill_mj), "decode": tenth(self.decode_mj), "total": tenth(all_mj),
            },
            "standard_error_mj": errors,
            "decode_mj_per_token": a_token,
            "method": self.method,
        })
    }
}

fn knower(server: &Server) -> Answered<Arc<dyn Power>> {
    let message = "power: this daemon does not look at its board (power.board is \"off\")";
    server.models.power.clone().ok_or_else(|| Fail::new(StatusCode::NOT_FOUND, message).code("no_power"))
}

/// `GET /v1/power`
pub async fn status(server: &Server) -> Answered<Response<Body>> {
    let power = knower(server)?;
    let served = server.models.peek().map(|l| (l.name.clone(), l.handle.metrics()));
    let up_us = server.started.elapsed().as_micros() as u64;
    super::blocking(move || {
        let mut value = power.status(served);
        if let Some(served) = value.get_mut("served").filter(|s| s.is_object()) {
            served["uptime_us"] = up_us.into();
        }
        Ok(json_response(StatusCode::OK, &value))
    })
    .await
}

/// `POST /v1/power` with `{"profile": NAME}` or `{"mode": NAME}`.
pub async fn switch(server: &Server, body: Value) -> Answered<Response<Body>> {
    let power = knower(server)?;
    let f = Fields::of_body(&body)?;
    let (profile, mode) = (f.text("profile")?.map(str::to_owned), f.text("mode")?.map(str::to_owned));
    f.done(&[])?;
    let said = super::blocking(move || match (profile, mode) {
        (Some(name), None) => Ok(power.set_profile(&name)?),
        (None, Some(name)) => Ok(power.set_mode(&name)?),
        _ => Err(Fail::field("profile", "a name here or in mode", "neither or both")),
    });
    Ok(json_response(StatusCode::OK, &json!({ "said": said.await? })))
}

#[test]
fn a_request_pays_for_its_share_of_each_phase() {
    let at = |prefill_mj, decode_mj| Spent { prefill_mj, decode_mj, errors: Some([0.05, 0.01]), method: "m" };
    let bill = Bill { spent: at(1000.0, 2000.0), read: 100, generated: 50 };
    let usage = Usage { read: 60, generated: 10, ..Usage::default() };
    // Of 120 tokens that were read meanwhile, 60; of 40 that were generated, 10.
    let e = bill.share(&at(3000.0, 10_000.0), (220, 90), &usage);
    assert_eq!((e.prefill_mj, e.decode_mj), (1000.0, 2000.0));
    assert_eq!(e.shown(10)["decode_mj_per_token"], 200.0);
    assert_eq!(e.shown(0)["decode_mj_per_token"], Value::Null);
    assert_eq!(e.shown(10)["standard_error_mj"], json!({ "prefill": 50.0, "decode": 20.0 }));
    assert_eq!(Energy { errors: None, ..e }.shown(10)["standard_error_mj"], Value::Null);
    // Its own tokens are not counted yet; meters that were read out of order give nothing, and nothing negative.
    assert_eq!(bill.share(&at(1500.0, 2000.0), (100, 50), &usage).prefill_mj, 500.0);
    assert_eq!(bill.share(&at(0.0, 0.0), (220, 90), &usage).decode_mj, 0.0);
    let cached = Usage { generated: 1, ..Usage::default() };
    assert_eq!(bill.share(&at(9000.0, 2100.0), (220, 51), &cached).prefill_mj, 0.0);
}
