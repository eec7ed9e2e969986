"""Random actions on a store, restarts included, against a model that is only dictionaries."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chatpage.store import (
    LOCAL_USER,
    ConversationId,
    NewNode,
    NodeId,
    NodeStatus,
    Role,
    RunKind,
    RunStatus,
    Store,
)

INDEX = st.integers(0, 10**6)
ENDS = st.sampled_from([NodeStatus.COMPLETE, NodeStatus.ABORTED, NodeStatus.ERROR])


@dataclass
class Message:
    """A node, in the model. `age` counts up and orders siblings."""

    parent: NodeId | None
    text: str
    status: NodeStatus
    age: int
    token_ids: tuple[int, ...] = ()


@dataclass
class Talk:
    """A conversation, in the model."""

    members: set[NodeId] = field(default_factory=set)
    deleted: set[NodeId] = field(default_factory=set)
    choices: dict[NodeId | None, NodeId] = field(default_factory=dict)
    is_deleted: bool = False


class StoreMachine(RuleBasedStateMachine):
    """What the store says must be what the model says, after every action."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.store = Store(Path(self.folder.name) / "chatpage.db")
        self.messages: dict[NodeId, Message] = {}
        self.talks: dict[ConversationId, Talk] = {}
        self.versions: dict[ConversationId, int] = {}
        self.age = 0

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    # the model

    def is_visible(self, talk: Talk, node_id: NodeId | None) -> bool:
        while node_id is not None:
            if node_id not in talk.members or node_id in talk.deleted:
                return False
            node_id = self.messages[node_id].parent
        return True

    def visible(self, talk: Talk) -> list[NodeId]:
        return sorted((n for n in talk.members if self.is_visible(talk, n)), key=lambda n: self.messages[n].age)

    def shown(self, talk: Talk) -> list[NodeId]:
        path: list[NodeId] = []
        while children := [n for n in self.visible(talk) if self.messages[n].parent == (path[-1] if path else None)]:
            choice = talk.choices.get(path[-1] if path else None)
            path.append(choice if choice in children and choice is not None else children[-1])
        return path

    def choose_path(self, talk: Talk, node_id: NodeId) -> None:
        step: NodeId | None = node_id
        while step is not None:
            talk.choices[self.messages[step].parent] = step
            step = self.messages[step].parent

    def learn(self, talk: Talk, node_id: NodeId, parent: NodeId | None, new: NewNode) -> None:
        self.age += 1
        self.messages[node_id] = Message(parent, new.text, new.status, self.age, tuple(new.token_ids))
        talk.members.add(node_id)

    def pick_talk(self, index: int) -> tuple[ConversationId, Talk] | None:
        alive = [(key, talk) for key, talk in self.talks.items() if not talk.is_deleted]
        return alive[index % len(alive)] if alive else None

    def pick(self, index: int) -> tuple[ConversationId, Talk, NodeId] | None:
        places = [(k, t, n) for k, t in self.talks.items() if not t.is_deleted for n in self.visible(t)]
        return places[index % len(places)] if places else None

    # the actions

    @initialize()
    def begin(self) -> None:
        self.talks[self.store.create_conversation(LOCAL_USER).id] = Talk()

    @rule()
    def create(self) -> None:
        if len(self.talks) < 4:
            self.talks[self.store.create_conversation(LOCAL_USER).id] = Talk()

    @rule(index=INDEX, at_root=st.booleans(), n=st.integers(1, 3))
    def send(self, index: int, at_root: bool, n: int) -> None:
        place = self.pick(index)
        talk_place = self.pick_talk(index)
        if talk_place is None:
            return
        conversation_id, talk = talk_place if at_root or place is None else place[:2]
        parent = None if at_root or place is None else place[2]
        question = NewNode(role=Role.USER, text=f"q{self.age}")
        run = self.store.start_run(LOCAL_USER, conversation_id, parent, kind=RunKind.REPLY, n=n, input=question).run
        assert run.input_node_id is not None
        self.learn(talk, run.input_node_id, parent, question)
        for sample in run.samples:
            self.learn(talk, sample.node_id, run.input_node_id, NewNode(role=Role.ASSISTANT, status=NodeStatus.STREAMING))
        self.choose_path(talk, run.samples[0].node_id)

    @rule(index=INDEX)
    def edit(self, index: int) -> None:
        if place := self.pick(index):
            conversation_id, talk, node_id = place
            new = NewNode(role=Role.USER, text=f"e{self.age}", token_ids=[self.age])
            added = self.store.edit_node(LOCAL_USER, conversation_id, node_id, new).nodes[0].id
            self.learn(talk, added, self.messages[node_id].parent, new)
            self.choose_path(talk, added)

    @rule(index=INDEX)
    def choose(self, index: int) -> None:
        if place := self.pick(index):
            conversation_id, talk, node_id = place
            self.store.choose_node(LOCAL_USER, conversation_id, node_id)
            self.choose_path(talk, node_id)

    @rule(index=INDEX)
    def delete(self, index: int) -> None:
        if place := self.pick(index):
            conversation_id, talk, node_id = place
            self.store.delete_node(LOCAL_USER, conversation_id, node_id)
            talk.deleted.add(node_id)

    @rule(index=INDEX)
    def undo(self, index: int) -> None:
        places = [(k, t, n) for k, t in self.talks.items() if not t.is_deleted for n in sorted(t.deleted)]
        if places:
            conversation_id, talk, node_id = places[index % len(places)]
            self.store.restore_node(LOCAL_USER, conversation_id, node_id)
            talk.deleted.discard(node_id)

    @rule(index=INDEX, whole=st.booleans())
    def fork(self, index: int, whole: bool) -> None:
        if (place := self.pick(index)) and len(self.talks) < 4:
            conversation_id, talk, node_id = place
            fork = Talk()
            if whole:
                fork.members = set(self.visible(talk))
                for parent in (None, *fork.members):
                    children = [n for n in self.visible(talk) if self.messages[n].parent == parent]
                    if children:
                        choice = talk.choices.get(parent)
                        fork.choices[parent] = choice if choice in children and choice is not None else children[-1]
            else:
                step: NodeId | None = node_id
                while step is not None:
                    fork.members.add(step)
                    step = self.messages[step].parent
                self.choose_path(fork, node_id)
            made = self.store.fork_conversation(LOCAL_USER, conversation_id, node_id=None if whole else node_id)
            self.talks[made.id] = fork

    @rule(index=INDEX, text=st.text(max_size=5), token=st.integers(0, 2**31 - 1))
    def flush(self, index: int, text: str, token: int) -> None:
        if node_id := self.pick_streaming(index):
            self.store.append_partial(node_id, text, [token])
            self.messages[node_id].text += text
            self.messages[node_id].token_ids += (token,)

    @rule(index=INDEX, status=ENDS)
    def stop(self, index: int, status: NodeStatus) -> None:
        if node_id := self.pick_streaming(index):
            self.store.finish_node(node_id, status, text="!")
            self.messages[node_id].text += "!"
            self.messages[node_id].status = status

    @rule(index=INDEX)
    def go_on(self, index: int) -> None:
        if place := self.pick(index):
            conversation_id, talk, node_id = place
            message = self.messages[node_id]
            run = self.store.start_run(LOCAL_USER, conversation_id, node_id, kind=RunKind.CONTINUE).run
            (sample,) = run.samples
            has_children = any(other.parent == node_id for other in self.messages.values())
            ended_early = message.status not in (NodeStatus.COMPLETE, NodeStatus.STREAMING)
            assert (sample.node_id == node_id) == (ended_early and not has_children)
            if sample.node_id == node_id:
                message.status = NodeStatus.STREAMING
            else:
                prefix = NewNode(
                    role=Role.ASSISTANT, text=message.text, token_ids=message.token_ids, status=NodeStatus.STREAMING
                )
                self.learn(talk, sample.node_id, message.parent, prefix)
                self.choose_path(talk, sample.node_id)
            self.store.finish_run(run.id, RunStatus.COMPLETE)

    @rule(index=INDEX)
    def delete_conversation(self, index: int) -> None:
        if place := self.pick_talk(index):
            self.store.delete_conversation(LOCAL_USER, place[0])
            place[1].is_deleted = True

    @rule()
    def restore_conversations(self) -> None:
        for conversation_id, talk in self.talks.items():
            self.store.restore_conversation(LOCAL_USER, conversation_id)
            talk.is_deleted = False

    @rule()
    def purge(self) -> None:
        self.store.purge_deleted(before=2**53)
        self.talks = {key: talk for key, talk in self.talks.items() if not talk.is_deleted}
        for talk in self.talks.values():
            talk.members = set(self.visible(talk))
            talk.deleted.clear()
        kept = {node_id for talk in self.talks.values() for node_id in talk.members}
        self.messages = {node_id: message for node_id, message in self.messages.items() if node_id in kept}

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = Store(Path(self.folder.name) / "chatpage.db")
        for message in self.messages.values():
            if message.status is NodeStatus.STREAMING:
                message.status = NodeStatus.INTERRUPTED

    def pick_streaming(self, index: int) -> NodeId | None:
        streaming = sorted(n for n, message in self.messages.items() if message.status is NodeStatus.STREAMING)
        return streaming[index % len(streaming)] if streaming else None

    # what must hold

    @invariant()
    def the_store_says_what_the_model_says(self) -> None:
        alive = {key: talk for key, talk in self.talks.items() if not talk.is_deleted}
        assert {found.id for found in self.store.list_conversations(LOCAL_USER)} == set(alive)
        for conversation_id, talk in alive.items():
            tree = self.store.get_tree(LOCAL_USER, conversation_id).tree
            assert tree.nodes.keys() == set(self.visible(talk))
            assert [node.id for node in tree.active_path()] == self.shown(talk)
            for node_id, node in tree.nodes.items():
                message = self.messages[node_id]
                assert (node.parent_id, node.text, node.token_ids, node.status) == (
                    *(message.parent, message.text, message.token_ids, message.status),
                )
            for parent, children in tree.children.items():
                assert list(children) == [n for n in self.visible(talk) if self.messages[n].parent == parent]

    @invariant()
    def versions_never_fall(self) -> None:
        for conversation in self.store.list_conversations(LOCAL_USER):
            assert conversation.version >= self.versions.get(conversation.id, 1)
            self.versions[conversation.id] = conversation.version

    @invariant()
    def the_database_holds_the_nodes_of_the_model_and_no_other(self) -> None:
        rows = self.store.database.read(lambda db: db.execute("SELECT id FROM nodes").fetchall()).result()
        assert {row[0] for row in rows} == set(self.messages)

    @precondition(lambda self: bool(self.messages))
    @rule(index=INDEX)
    def search_finds_a_message_wherever_it_is_visible(self, index: int) -> None:
        named = sorted(n for n, message in self.messages.items() if message.text[:1] in ("q", "e"))
        if not named:
            return
        node_id = named[index % len(named)]
        message = self.messages[node_id]
        hits = self.store.search(LOCAL_USER, f'"{message.text}"', limit=200)
        found = {hit.conversation_id for hit in hits if hit.node_id == node_id}
        is_ended = message.status is not NodeStatus.STREAMING
        alive = {key: talk for key, talk in self.talks.items() if not talk.is_deleted}
        assert found == {key for key, talk in alive.items() if is_ended and self.is_visible(talk, node_id)}


StoreMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestStore = StoreMachine.TestCase
