//! Sources and loading, over files written by the tests themselves.

use super::*;
use crate::format::layout::{F8_BLOCK, TILE_ROWS};
use crate::format::{Codec, Tiles, gguf, gguf_write};
use crate::units::Result;
use std::fs;
use std::path::Path;

/// xorshift64*: enough for test bytes.
struct Random(u64);

impl Random {
    fn byte(&mut self) -> u8 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 56) as u8
    }

    fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.byte()).collect()
    }
}

/// Random bytes that decode to finite numbers in every codec used here.
fn tensor_bytes(random: &mut Random, codec: Codec, dims: &[usize]) -> Vec<u8> {
    let n: usize = dims.iter().product();
    match codec {
        Codec::F32 => (0..n).flat_map(|_| (f32::from(random.byte()) - 128.0).to_le_bytes()).collect(),
        Codec::BF16 => (0..n).flat_map(|_| [random.byte(), 0x3c | random.byte() & 0x83]).collect(),
        Codec::F8E4M3 => random.bytes(n).iter().map(|b| b & 0xf7).collect(),
        Codec::Q4_0 => {
            (0..n / 32).flat_map(|_| [vec![random.byte(), 0x2c], random.bytes(16)].concat()).collect()
        }
        Codec::Q6K => {
            (0..n / 256).flat_map(|_| [random.bytes(208), vec![random.byte(), 0x24]].concat()).collect()
        }
        _ => unreachable!("not used here"),
    }
}

/// Writes a GGUF with these tensors.
fn write_gguf(path: &Path, meta: &[(&str, gguf::Value)], tensors: &[(&str, Codec, &[usize])]) {
    let mut plan = gguf_write::Plan::new();
    meta.iter().for_each(|(k, v)| plan.meta(k, v));
    tensors.iter().for_each(|(name, codec, dims)| plan.tensor(name, *codec, dims));
    let mut body = plan.start(fs::File::create(path).unwrap()).unwrap();
    let mut random = Random(7);
    for (name, codec, dims) in tensors {
        body.begin(name).unwrap();
        body.write(&tensor_bytes(&mut random, *codec, dims)).unwrap();
    }
    body.finish().unwrap();
}

/// Writes a safetensors file with these tensors; returns nothing but the file.
fn write_safetensors(path: &Path, tensors: &[(&str, Codec, &[usize])]) {
    let (mut header, mut data, mut random) = (serde_json::Map::new(), Vec::new(), Random(3));
    for (name, codec, dims) in tensors {
        let begin = data.len();
        data.extend(tensor_bytes(&mut random, *codec, dims));
        let dtype = match codec {
            Codec::F32 => "F32",
            Codec::BF16 => "BF16",
            _ => "F8_E4M3",
        };
        let entry = serde_json::json!({"dtype": dtype, "shape": dims, "data_offsets": [begin, data.len()]});
        header.insert((*name).to_owned(), entry);
    }
    let header = serde_json::Value::Object(header).to_string();
    fs::write(path, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()).unwrap();
}

fn span(source: &Source, name: &str, first_row: usize, rows: usize) -> RowSpan {
    RowSpan { tensor: source.find(name).unwrap(), first_row, rows }
}

fn job(spans: Vec<RowSpan>, transpose: bool) -> MatrixJob {
    MatrixJob { name: "test".into(), spans, transpose }
}

/// What a job's matrix must hold, from `read_f32` alone.
fn want(source: &Source, job: &MatrixJob) -> Vec<Vec<f32>> {
    let mut rows = Vec::new();
    for s in &job.spans {
        let cols = source.tensors()[s.tensor].cols();
        let all = source.read_f32(s.tensor).unwrap();
        rows.extend(all.chunks(cols).skip(s.first_row).take(s.rows).map(<[f32]>::to_vec));
    }
    if job.transpose {
        (0..rows[0].len()).map(|k| rows.iter().map(|r| r[k]).collect()).collect()
    } else {
        rows
    }
}

fn assert_loads(source: &Source, jobs: &[MatrixJob], codecs: &[Codec]) {
    let matrices = load(source, jobs, 3, &|_| ()).unwrap();
    let total: usize = matrices.iter().map(Matrix::size_bytes).sum();
    assert_eq!(resident_bytes(source, jobs).unwrap(), total as u64);
    for ((m, job), codec) in matrices.iter().zip(jobs).zip(codecs) {
        let want = want(source, job);
        assert_eq!((m.codec, m.rows, m.cols), (*codec, want.len(), want[0].len()), "{job:?}");
        let tiles = Tiles::new(m.codec, m.rows, m.cols, &m.bytes);
        let mut got = vec![0.0; m.cols];
        for (r, want) in want.iter().enumerate() {
            tiles.row(r, &mut got);
            assert_eq!(&got, want, "{job:?} row {r}");
        }
    }
}

#[test]
fn gguf_matrices_load_as_they_are_sliced_joined_and_turned() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let tensors: [(&str, Codec, &[usize]); 5] = [
        ("experts", Codec::Q4_0, &[5, 24, 64]),
        ("q", Codec::Q6K, &[40, 256]),
        ("k", Codec::BF16, &[33, 256]),
        ("v", Codec::BF16, &[7, 256]),
        ("big", Codec::F32, &[3000, 257]),
    ];
    write_gguf(&path, &[], &tensors);
    let s = Source::open(&path).unwrap();
    let all = |name: &str, n| span(&s, name, 0, n);
    let jobs = [
        job(vec![span(&s, "experts", 2 * 24, 24)], false),
        job(vec![all("q", 40)], false),
        // Joined where no tile ends.
        job(vec![all("k", 33), all("v", 7)], false),
        job(vec![all("q", 40), span(&s, "k", 3, 20)], false),
        job(vec![all("k", 33)], true),
        job(vec![span(&s, "experts", 30, 10), span(&s, "experts", 3, 5)], true),
        // Several units a matrix.
        job(vec![all("big", 3000)], false),
    ];
    use Codec::*;
    assert_loads(&s, &jobs, &[Q4_0, Q6K, BF16, F32, BF16, F32, F32]);
    assert_eq!(s.file_bytes(), fs::metadata(&path).unwrap().len());
}

#[test]
fn fp8_keeps_its_blocks_or_becomes_f32() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), "{\"quantization_config\":{\"weight_block_size\":[128,128]}}")
        .unwrap();
    let tensors: [(&str, Codec, &[usize]); 3] = [
        ("w.weight_scale_inv", Codec::F32, &[3, 2]),
        ("w.weight", Codec::F8E4M3, &[300, 200]),
        ("n", Codec::BF16, &[200]),
    ];
    write_safetensors(&dir.path().join("model.safetensors"), &tensors);
    let s = Source::open(dir.path()).unwrap();
    let jobs = [
        job(vec![span(&s, "w.weight", 0, 300)], false),
        job(vec![span(&s, "w.weight", F8_BLOCK, 140)], false),
        job(vec![span(&s, "w.weight", TILE_ROWS, 140)], false),
        job(vec![span(&s, "w.weight", 0, 128), span(&s, "w.weight", 256, 44)], false),
        job(vec![span(&s, "w.weight", 0, 300)], true),
        job(vec![span(&s, "n", 0, 1)], false),
    ];
    use Codec::*;
    assert_loads(&s, &jobs, &[F8E4M3, F8E4M3, F32, F32, F32, BF16]);
}

#[test]
fn split_gguf_opens_from_any_part_and_from_its_folder() {
    let dir = tempfile::tempdir().unwrap();
    let part = |i: usize| dir.path().join(format!("m-{:05}-of-00002.gguf", i + 1));
    let meta = |i: u16| [("split.no", gguf::Value::U16(i)), ("split.count", gguf::Value::U16(2))];
    write_gguf(&part(0), &meta(0), &[("a", Codec::F32, &[4])]);
    write_gguf(&part(1), &meta(1), &[("b", Codec::F32, &[5])]);
    for path in [part(0), part(1), dir.path().to_owned()] {
        let s = Source::open(&path).unwrap();
        assert_eq!(s.read_f32(s.find("b").unwrap()).unwrap().len(), 5);
    }
    fs::remove_file(part(1)).unwrap();
    let e = Source::open(&part(0)).unwrap_err().to_string();
    assert!(e.contains("m-00002-of-00002.gguf: open"), "{e}");
}

#[test]
fn an_index_must_match_its_shards() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("config.json"), "{}").unwrap();
    write_safetensors(&at("x-1.safetensors"), &[("a", Codec::F32, &[4])]);
    write_safetensors(&at("x-2.safetensors"), &[("b", Codec::BF16, &[2, 2])]);
    let index = |map: &str| {
        fs::write(at("model.safetensors.index.json"), format!("{{\"weight_map\":{map}}}")).unwrap()
    };
    index(r#"{"b":"x-2.safetensors","a":"x-1.safetensors"}"#);
    let s = Source::open(dir.path())?;
    assert_eq!(s.tensors().len(), 2);
    assert!(s.file_of(s.find("b").unwrap()).ends_with("x-2.safetensors"));
    for (map, says) in [
        (r#"{"a":"x-1.safetensors","b":"x-1.safetensors"}"#, "weight_map: b"),
        (r#"{"a":"x-1.safetensors","b":"x-3.safetensors"}"#, "x-3.safetensors: open"),
        (r#"{"a":"../x-1.safetensors"}"#, "a file name in this folder"),
        (r#"{}"#, "at least one tensor"),
        (r#"["a"]"#, "expected '{'"),
    ] {
        index(map);
        let e = Source::open(dir.path()).unwrap_err().to_string();
        assert!(e.contains(says), "{map}: {e}");
    }
    Ok(())
}

#[test]
fn a_file_cut_after_opening_is_an_error_that_names_the_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    write_gguf(&path, &[], &[("a", Codec::F32, &[64, 64]), ("b", Codec::F32, &[64, 64])]);
    let s = Source::open(&path).unwrap();
    let len = fs::metadata(&path).unwrap().len();
    fs::File::options().write(true).open(&path).unwrap().set_len(len - 5000).unwrap();
    let jobs = ["a", "b"].map(|n| job(vec![span(&s, n, 0, 64)], false));
    let e = load(&s, &jobs, 2, &|_| ()).unwrap_err();
    assert!(e.to_string().contains("m.gguf: read 16384 bytes at offset"), "{e}");
    assert!(e.to_string().contains("tensor b"), "{e}");
    assert_eq!(e.exit_code(), 2);
}

/// `TEGU_LOAD=model.gguf cargo test --release -- --ignored --nocapture load_speed`
#[test]
#[ignore = "a measurement, not a check"]
fn load_speed() {
    let start = std::time::Instant::now();
    let s = Source::open(Path::new(&std::env::var("TEGU_LOAD").unwrap())).unwrap();
    let opened = start.elapsed();
    let jobs: Vec<MatrixJob> = (0..s.tensors().len())
        .map(|t| job(vec![RowSpan { tensor: t, first_row: 0, rows: s.tensors()[t].rows() }], false))
        .collect();
    let m = load(&s, &jobs, 2, &|_| ()).unwrap();
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find(|l| l.starts_with("VmHWM")).unwrap();
    let bytes = s.file_bytes();
    println!("open {opened:?}, all {:?}, {} matrices, file {bytes} bytes, {peak}", start.elapsed(), m.len());
}
