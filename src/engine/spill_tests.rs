use super::*;

/// Waits until the thread has nothing to write.
fn settle(spill: &SpillFile) {
    assert!(spill.shared.queue.room(usize::MAX / 2, Duration::from_secs(60)), "it writes");
}

fn read(spill: &SpillFile, slot: SlotId) -> Result<Vec<u8>> {
    let mut out = vec![];
    spill.read(slot, &mut out).map(|()| out)
}

#[test]
fn slots_come_back_and_a_changed_one_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let mut spill = SpillFile::create(folder.path(), 100, 350).unwrap();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "no name");
    let slots: Vec<_> = (0..3).map(|i| spill.write(vec![i; 90 + i as usize]).unwrap()).collect();
    assert!(spill.full() && spill.used_bytes() == 300);
    for settled in [false, true] {
        for (i, &slot) in slots.iter().enumerate() {
            assert_eq!(read(&spill, slot).unwrap(), vec![i as u8; 90 + i], "written: {settled}");
        }
        settle(&spill);
    }
    spill.release(slots[1]);
    assert!(!spill.full());
    assert_eq!(spill.write(b"short".to_vec()), Some(slots[1]));
    assert_eq!(read(&spill, slots[1]).unwrap(), b"short");
    settle(&spill);
    spill.shared.file.write_all_at(b"x", 205).unwrap();
    let error = read(&spill, slots[2]).unwrap_err().to_string();
    assert!(error.contains("checksum"), "{error}");
    let nowhere = SpillFile::create(Path::new("/dev/null/x"), 1, 1).map(|_| ()).unwrap_err().to_string();
    assert!(nowhere.contains("create"), "{nowhere}");
}

#[test]
fn a_disk_that_stands_still_holds_no_one_up_and_what_waits_is_there() {
    let (folder, big) = (tempfile::tempdir().unwrap(), SPILL_QUEUE_BYTES_MAX / 2);
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(folder.path().join("x"));
    let mut spill = SpillFile::on(file.unwrap(), folder.path(), big, 100 * big as u64);
    // No thread writes yet.
    let slots: Vec<_> = (0..2).map(|i| spill.write(vec![i; big]).unwrap()).collect();
    assert_eq!((spill.write(vec![9; big]), spill.stalled), (None, true));
    // Only the first of them waits: if all did, none would be faster than its patience.
    let took = (0..100).map(|_| {
        let began = std::time::Instant::now();
        assert!(spill.write(vec![9; 1]).is_none());
        began.elapsed()
    });
    assert!(took.min().is_some_and(|fastest| fastest < PATIENCE));
    for (i, &slot) in slots.iter().enumerate() {
        assert!(read(&spill, slot).unwrap() == vec![i as u8; big], "out of memory");
    }
    spill.start().unwrap();
    settle(&spill);
    assert_eq!(spill.write(vec![3; 5]), Some(2));
    for (i, &slot) in slots.iter().enumerate() {
        assert!(read(&spill, slot).unwrap() == vec![i as u8; big], "from disk");
    }
}

#[test]
fn a_slot_taken_again_holds_the_last_that_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let mut spill = SpillFile::create(folder.path(), 64, 64).unwrap();
    for round in 0..200u8 {
        let slot = spill.write(vec![round; 64]).unwrap();
        assert_eq!(slot, 0);
        if round % 3 == 0 {
            settle(&spill);
        }
        assert_eq!(read(&spill, slot).unwrap(), vec![round; 64]);
        spill.release(slot);
    }
}

#[test]
fn a_pinned_slot_outlives_its_release() {
    let folder = tempfile::tempdir().unwrap();
    let mut spill = SpillFile::create(folder.path(), 64, 64).unwrap();
    let slot = spill.write(vec![7; 64]).unwrap();
    let (a, b) = (spill.pin(slot), spill.pin(slot));
    spill.release(slot);
    assert!(spill.full(), "it cannot be taken yet");
    drop(a);
    settle(&spill);
    let mut out = vec![];
    b.read(&mut out).unwrap();
    assert!(out == [7; 64] && spill.full());
    drop(b);
    assert!(!spill.full() && spill.used_bytes() == 0);
}

#[test]
fn what_the_disk_does_not_take_is_an_error_when_it_is_read() {
    // Writes to it fail as on a full disk.
    let full = OpenOptions::new().read(true).write(true).open("/dev/full").unwrap();
    let mut spill = SpillFile::on(full, Path::new("/dev/full"), 64, 640);
    spill.start().unwrap();
    let slot = spill.write(vec![7; 64]).unwrap();
    settle(&spill);
    let error = read(&spill, slot).unwrap_err().to_string();
    assert!(error.contains("/dev/full") && error.contains("spill 64 bytes"), "{error}");
    spill.release(slot);
    assert_eq!(spill.write(vec![8; 64]), Some(slot), "the slot is of use again");
}
