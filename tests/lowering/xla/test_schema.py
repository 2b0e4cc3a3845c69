"""The schema: found in a plugin's library, kept in a file, and never taken from a broken one."""

from __future__ import annotations

import gc
import pathlib
import sys
import weakref
from collections.abc import Iterator

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from tests.fakes.xla_recordings import read_files, recorded_schema
from tests.oracles.error_lines import match
from tracegraph.lowering.xla import schema as schema_module
from tracegraph.lowering.xla.descriptors import find_closure, scan_library
from tracegraph.lowering.xla.schema import (
    EXECUTABLE,
    ROOTS,
    build_schema,
    find_plugin,
    legal_compile_options,
    load_schema,
)
from tracegraph.runtime.errors import UnsupportedError

LIBRARY = "xla_cuda_plugin.so"


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    for each in (schema_module._load_schema, schema_module._read_plugin_in_use):
        each.cache_clear()
    yield
    for each in (schema_module._load_schema, schema_module._read_plugin_in_use):
        each.cache_clear()


@pytest.fixture
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Returns the folder that cache files go to."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tracegraph"


@pytest.fixture
def plugins(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Returns an import path that has no plugin yet and replaces the one of this process."""
    folder = tmp_path / "site"
    (folder / "jax_plugins").mkdir(parents=True)
    monkeypatch.setattr(schema_module, "_MAPPED", tmp_path / "maps")
    monkeypatch.setattr("sys.path", [str(folder)])
    monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
    return folder / "jax_plugins"


def write_library(folder: pathlib.Path, name: str = "xla_cuda13", between: bytes = b"") -> None:
    """Writes a library that holds the recorded descriptions, with code around them."""
    code = b"\x7fELF" + bytes(range(256)) * 40
    pieces = [code]
    for file in read_files().file:
        pieces += [file.SerializeToString(), between]
    (folder / name).mkdir()
    (folder / name / LIBRARY).write_bytes(b"".join([*pieces, code]))


def messages_of(file: FileDescriptorProto) -> bytes:
    return file.SerializeToString(deterministic=True)


class TestScan:
    @pytest.mark.parametrize("between", [b"", b"\0", b"\0" * 7, b"text.proto\0", b"\xff\xfe"])
    def test_every_description_is_found(self, tmp_path: pathlib.Path, between: bytes) -> None:
        write_library(tmp_path, between=between)
        found = scan_library(tmp_path / "xla_cuda13" / LIBRARY)
        wanted = {file.name: messages_of(file) for file in read_files().file}
        assert {name: messages_of(file) for name, file in found.items()} == wanted

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\x0a\x07a.proto",
            b"\x0a\x07a.proto\x12",
            b"\x0a\x07a.proto\x12\x7fshort",
            b"\x0a\x07a.proto\x22\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
            b"\x0a\x07a.proto\x22\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80",
            b".proto\x12" * 50,
            b"include a.proto\x12\x01p and more",
        ],
    )
    def test_other_text_is_no_description(self, tmp_path: pathlib.Path, data: bytes) -> None:
        (tmp_path / LIBRARY).write_bytes(data)
        assert scan_library(tmp_path / LIBRARY) == {}

    def test_the_closure_is_in_order_of_imports(self) -> None:
        files = {file.name: file for file in read_files().file}
        spare = FileDescriptorProto(name="spare.proto", package="spare")
        spare.message_type.add(name="Spare")
        ordered = find_closure({"spare.proto": spare, **files}, ROOTS)
        names = [file.name for file in ordered]
        assert set(names) == set(files)
        for index, file in enumerate(ordered):
            assert set(file.dependency) <= set(names[:index])

    def test_a_missing_import_is_named(self) -> None:
        lonely = FileDescriptorProto(name="a.proto", package="p", dependency=["b.proto"])
        lonely.message_type.add(name="M")
        with pytest.raises(KeyError, match=r"b\.proto"):
            find_closure({"a.proto": lonely}, ("p.M",))

    def test_files_that_import_each_other_are_refused(self) -> None:
        first = FileDescriptorProto(name="a.proto", package="p", dependency=["b.proto"])
        first.message_type.add(name="M")
        second = FileDescriptorProto(name="b.proto", dependency=["a.proto"])
        with pytest.raises(ValueError, match="cycle"):
            find_closure({"a.proto": first, "b.proto": second}, ("p.M",))


class TestSchema:
    def test_classes_and_fields_are_found(self) -> None:
        schema = recorded_schema()
        assert schema.message_class(EXECUTABLE).DESCRIPTOR.full_name == EXECUTABLE
        assert schema.fields_of("xla.gpu.ThunkProto")["custom_kernel_thunk"].number == 36

    def test_classes_stay_between_two_programs(self) -> None:
        """Protobuf's own tables hold none of them."""
        schema = build_schema(read_files().file, "a copy")
        first = weakref.ref(schema.message_class("xla.gpu.ThunkProto"))
        gc.collect()
        assert first() is schema.message_class("xla.gpu.ThunkProto")
        del schema
        gc.collect()
        assert first() is None

    def test_an_unknown_type_is_refused(self) -> None:
        for find in (recorded_schema().message_class, recorded_schema().fields_of):
            with pytest.raises(UnsupportedError) as caught:
                find("xla.gpu.Nothing")
            match(
                caught.value,
                "the program that XLA compiled cannot be read: the CUDA plugin describes no xla.",
                "the recorded schema",
                "tracegraph reads the form",
                "pip install",
            )

    def test_descriptions_that_do_not_fit_are_refused(self) -> None:
        files = list(read_files().file)
        with pytest.raises(UnsupportedError, match="does not fit"):
            build_schema(reversed(files), "here")

    def test_a_plugin_without_a_root_is_refused(self) -> None:
        with pytest.raises(
            UnsupportedError, match=r"plugin describes no xla\.gpu\.GpuExecutableProto"
        ):
            build_schema([], "here")


class TestFindPlugin:
    def test_an_installed_one_is_found(self, plugins: pathlib.Path) -> None:
        write_library(plugins)
        assert find_plugin() == plugins / "xla_cuda13" / LIBRARY

    def test_the_one_in_use_comes_first(self, plugins: pathlib.Path) -> None:
        write_library(plugins)
        used = plugins / "with space" / LIBRARY
        (plugins.parent.parent / "maps").write_text(
            "7f00-7f01 r--p 00000000 08:01 12                /usr/lib/libc.so.6\n"
            f"7f01-7f02 r--p 00000000 08:01 13                {used}\n"
            f"7f02-7f03 r-xp 00001000 08:01 13                {used}\n"
            "7f03-7f04 rw-p 00000000 00:00 0\n"
        )
        assert find_plugin() == used

    def test_one_in_use_is_looked_for_once_until_its_file_changes(
        self, plugins: pathlib.Path
    ) -> None:
        write_library(plugins)
        used, maps = plugins / "xla_cuda13" / LIBRARY, plugins.parent.parent / "maps"
        maps.write_text(f"7f01-7f02 r--p 00000000 08:01 13    {used}\n")
        assert find_plugin() == used
        maps.write_text("")
        assert find_plugin() == used
        maps.write_text(f"7f01-7f02 r--p 00000000 08:01 13    {used} (deleted)\n")
        used.rename(used.with_name("old"))
        for _ in range(2):
            with pytest.raises(UnsupportedError, match="was replaced while"):
                find_plugin()

    def test_one_that_comes_into_use_is_found(self, plugins: pathlib.Path) -> None:
        write_library(plugins, "xla_cuda12")
        write_library(plugins, "xla_cuda13")
        with pytest.raises(UnsupportedError, match="several"):
            find_plugin()
        used = plugins / "xla_cuda12" / LIBRARY
        maps = plugins.parent.parent / "maps"
        maps.write_text(f"7f01-7f02 r--p 00000000 08:01 13    {used}\n")
        assert find_plugin() == used

    def test_one_that_was_replaced_is_refused(self, plugins: pathlib.Path) -> None:
        """Its programs still come from the old library, which the new one may not describe."""
        write_library(plugins)
        used = plugins / "xla_cuda13" / LIBRARY
        line = f"7f01-7f02 r--p 00000000 08:01 13    {used} (deleted)\n"
        (plugins.parent.parent / "maps").write_text(line)
        with pytest.raises(
            UnsupportedError, match="plugin was replaced while this process used it"
        ):
            find_plugin()

    def test_none_is_refused(self, plugins: pathlib.Path) -> None:
        for load in (find_plugin, load_schema, legal_compile_options):
            with pytest.raises(UnsupportedError) as caught:
                load()
            match(
                caught.value,
                "the CUDA plugin of JAX is not installed",
                "no jax_plugins/xla_cuda*/xla_cuda_plugin.so",
                "it compiles for the GPU",
                'pip install "jax[cuda13]"',
            )

    def test_jax_plugins_may_be_missing(
        self, plugins: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.path", [])
        with pytest.raises(UnsupportedError, match="is not installed"):
            find_plugin()

    def test_two_are_refused_while_none_is_in_use(self, plugins: pathlib.Path) -> None:
        write_library(plugins, "xla_cuda12")
        write_library(plugins, "xla_cuda13")
        with pytest.raises(UnsupportedError) as caught:
            find_plugin()
        match(
            caught.value,
            "several CUDA plugins of JAX are installed",
            f"{plugins / 'xla_cuda12' / LIBRARY} and {plugins / 'xla_cuda13' / LIBRARY}",
            "only one of them compiles",
            "pip uninstall",
        )


class TestCache:
    def count_scans(self, monkeypatch: pytest.MonkeyPatch) -> list[pathlib.Path]:
        scanned: list[pathlib.Path] = []

        def scan(path: pathlib.Path) -> dict[str, FileDescriptorProto]:
            scanned.append(path)
            return scan_library(path)

        monkeypatch.setattr(schema_module, "scan_library", scan)
        return scanned

    def load_anew(self) -> None:
        """Loads as another process would."""
        schema_module._load_schema.cache_clear()
        assert load_schema().fields_of("xla.gpu.ThunkProto")["custom_kernel_thunk"].number == 36

    def test_a_library_is_scanned_once(
        self, plugins: pathlib.Path, cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_library(plugins)
        scanned = self.count_scans(monkeypatch)
        assert load_schema() is load_schema()
        self.load_anew()
        assert len(scanned) == 1
        assert len(list(cache.iterdir())) == 1
        assert "xla_gpu_autotune_level" in legal_compile_options()

    def test_another_library_is_scanned(
        self, plugins: pathlib.Path, cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_library(plugins)
        scanned = self.count_scans(monkeypatch)
        self.load_anew()
        with (plugins / "xla_cuda13" / LIBRARY).open("ab") as library:
            library.write(b"more")
        load_schema()
        assert len(scanned) == 2
        assert len(list(cache.iterdir())) == 2

    @pytest.mark.parametrize("fault", ["empty", "short", "changed", "other", "folder"])
    def test_a_broken_file_is_written_again(
        self,
        fault: str,
        plugins: pathlib.Path,
        cache: pathlib.Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        write_library(plugins)
        self.load_anew()
        (file,) = cache.iterdir()
        good = file.read_bytes()
        bad = {
            "empty": b"",
            "short": good[:-1000],
            "changed": good[:5000] + b"\xff" + good[5001:],
            "other": b"another form 7" + good,
        }
        file.unlink()
        file.write_bytes(bad[fault]) if fault in bad else file.mkdir()
        scanned = self.count_scans(monkeypatch)
        self.load_anew()
        assert len(scanned) == 1
        assert fault == "folder" or file.read_bytes() == good

    @pytest.mark.parametrize("home", ["file", "relative", "none"])
    def test_a_cache_is_not_needed(
        self,
        home: str,
        plugins: pathlib.Path,
        tmp_path: pathlib.Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        write_library(plugins)
        blocked = tmp_path / "blocked"
        blocked.write_text("a file where a folder is wanted")
        monkeypatch.setenv("XDG_CACHE_HOME", "a/b" if home == "relative" else "")
        monkeypatch.setattr(pathlib.Path, "home", lambda: blocked)
        if home == "file":
            monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
        if home == "none":
            monkeypatch.setattr(pathlib.Path, "home", self.refuse_home)
        self.load_anew()
        self.load_anew()
        assert blocked.is_file()
        assert not pathlib.Path("a/b").exists()

    @staticmethod
    def refuse_home() -> pathlib.Path:
        raise RuntimeError("no home folder")

    def test_a_library_with_a_cycle_is_refused(
        self, plugins: pathlib.Path, cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_library(plugins)
        root = FileDescriptorProto(name="a.proto", package="xla.gpu", dependency=["a.proto"])
        root.message_type.add(name="GpuExecutableProto")
        monkeypatch.setattr(schema_module, "scan_library", lambda path: {"a.proto": root})
        monkeypatch.setattr(schema_module, "ROOTS", (EXECUTABLE,))
        with pytest.raises(UnsupportedError, match="files of the CUDA plugin import each other"):
            load_schema()

    def test_a_library_without_a_root_is_refused(
        self, plugins: pathlib.Path, cache: pathlib.Path
    ) -> None:
        (plugins / "xla_cuda12").mkdir()
        (plugins / "xla_cuda12" / LIBRARY).write_bytes(b"\x7fELF of another time")
        with pytest.raises(
            UnsupportedError, match=r"plugin describes no xla\.gpu\.GpuExecutableProto"
        ):
            load_schema()
        assert not cache.exists()


def test_the_installed_plugin_is_read(cache: pathlib.Path) -> None:
    try:
        path = find_plugin()
    except UnsupportedError as error:
        pytest.skip(error.what)
    assert load_schema().origin == str(path)
    assert len(legal_compile_options()) > 300
    assert "custom_kernel_thunk" in load_schema().fields_of("xla.gpu.ThunkProto")
