//! `tegu bench --kernels`: the matrix products of each codec beside the memory roof.

use serde_json::json;

use super::out;
use crate::app;
use crate::backend::cpu::kernels::bench::{KernelBench, KernelRate, ReadRoof, bench_kernels};
use crate::observe::{Progress, Unit};
use crate::units::{Bytes, Error, Result};

/// Measures and prints.
pub fn run(options: KernelBench, as_json: bool) -> Result<()> {
    // As much again must stay free: a measurement pushes nothing out.
    if let Some(has) = app::available_bytes().filter(|has| *has < 2 * options.bytes as u64) {
        let needs = format!("{} for --roof-mib, and as much again to spare", Bytes(options.bytes as u64));
        return Err(Error::Limit { what: "memory".into(), needs, has: Bytes(has).to_string() });
    }
    let progress = Progress::new("kernels", options.codecs().count() as u64, Unit::Items);
    let roof = ReadRoof::new(options.threads, options.bytes)?.rate();
    let mut rates = Vec::new();
    bench_kernels(&options, &mut |rate| {
        rates.push(*rate);
        progress.add(1);
    })?;
    drop(progress);
    if !as_json {
        return out::Out::stdout().text(&table(&options, roof, &rates));
    }
    out::Out::stdout().json(&json!({
        "threads": options.threads,
        "kernels": options.isa.name(),
        "roof_bytes_a_second": out::number(roof),
        "prefill_rows": options.prefill_rows,
        "results": rates.iter().map(|r| json!({
            "codec": r.codec.name(),
            "decode_bytes_a_second": out::number(r.decode_bytes_per_s),
            "share_of_roof": out::number(r.share_of_roof),
            "prefill_macs_a_second": out::number(r.prefill_macs_per_s),
            "weights_multiplied": r.multiplied,
        })).collect::<Vec<_>>(),
    }))
}

/// For people.
fn table(options: &KernelBench, roof: f64, rates: &[KernelRate]) -> String {
    let many = format!("{} rows GMAC/s", options.prefill_rows);
    let mut rows = vec![["codec", "one row GB/s", "of roof", &many].map(str::to_owned).to_vec()];
    rows.extend(rates.iter().map(|r| {
        vec![
            r.codec.name().to_owned(),
            format!("{:.1}", r.decode_bytes_per_s / 1e9),
            format!("{:.0}%", r.share_of_roof * 100.0),
            format!("{:.1}", r.prefill_macs_per_s / 1e9),
        ]
    }));
    let (threads, isa) = (options.threads, options.isa.name());
    format!("{}read roof, {threads} threads: {:.1} GB/s; kernels: {isa}\n", out::table(&rows), roof / 1e9)
}
