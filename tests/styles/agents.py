"""Reinforcement learning: the data are what the agent lives through while it trains."""

from collections import OrderedDict, deque, namedtuple

import lightning
import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.styles.frame import Job, style

Experience = namedtuple("Experience", ("state", "action", "reward", "done", "new_state"))


class Corridor:
    """An environment: walk to one of its ends."""

    def reset(self):
        self.place = 0.0
        return self.state()

    def state(self):
        return np.array([self.place, abs(self.place), 1.0, np.sign(self.place)], dtype=np.float32)

    def step(self, action):
        self.place += (0.25 if action else -0.25) + np.random.normal(scale=0.05)
        done = abs(self.place) >= 1
        return self.state(), float(self.place > 0) - 0.1, done


class ReplayBuffer:
    def __init__(self, capacity):
        self.buffer = deque(maxlen=capacity)

    def __len__(self):
        return len(self.buffer)

    def append(self, experience):
        self.buffer.append(experience)

    def sample(self, batch_size):
        indices = np.random.choice(len(self.buffer), batch_size, replace=False)
        states, actions, rewards, dones, next_states = zip(*[self.buffer[idx] for idx in indices], strict=True)
        return (
            np.array(states),
            np.array(actions),
            np.array(rewards, dtype=np.float32),
            np.array(dones, dtype=bool),
            np.array(next_states),
        )


class RLDataset(IterableDataset):
    """A stream of what the buffer holds where an epoch begins."""

    def __init__(self, buffer, sample_size):
        self.buffer, self.sample_size = buffer, sample_size

    def __iter__(self):
        states, actions, rewards, dones, new_states = self.buffer.sample(self.sample_size)
        for i in range(len(dones)):
            yield states[i], actions[i], rewards[i], dones[i], new_states[i]


class Agent:
    def __init__(self, env, replay_buffer):
        self.env, self.replay_buffer = env, replay_buffer
        self.reset()

    def reset(self):
        self.state = self.env.reset()

    @torch.no_grad()
    def play_step(self, net, epsilon=0.0):
        if np.random.random() < epsilon:
            action = int(np.random.randint(2))
        else:
            action = int(net(torch.tensor(self.state)[None]).argmax(1).item())
        new_state, reward, done = self.env.step(action)
        self.replay_buffer.append(Experience(self.state, action, reward, done, new_state))
        self.state = new_state
        if done:
            self.reset()
        return reward, done


class DQNLightning(LightningModule):
    def __init__(self, batch_size=4, sync_rate=3, warm_start_steps=40, episode_length=36):
        super().__init__()
        self.save_hyperparameters()
        self.env = Corridor()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        self.target_net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        self.buffer = ReplayBuffer(64)
        self.agent = Agent(self.env, self.buffer)
        self.total_reward = 0
        self.episode_reward = 0
        for _ in range(warm_start_steps):
            self.agent.play_step(self.net, epsilon=1.0)

    def forward(self, x):
        return self.net(x)

    def dqn_mse_loss(self, batch):
        states, actions, rewards, dones, next_states = batch
        values = self.net(states).gather(1, actions.long().unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            next_values = self.target_net(next_states).max(1)[0]
            next_values[dones] = 0.0
        return nn.MSELoss()(values, next_values.detach() * 0.9 + rewards)

    def training_step(self, batch, nb_batch) -> OrderedDict:
        epsilon = max(0.01, 1.0 - self.global_step / 20)
        self.log("epsilon", epsilon)
        reward, done = self.agent.play_step(self.net, epsilon)
        self.episode_reward += reward
        self.log("episode reward", self.episode_reward)
        loss = self.dqn_mse_loss(batch)
        if done:
            self.total_reward = self.episode_reward
            self.episode_reward = 0
        if self.global_step % self.hparams.sync_rate == 0:
            self.target_net.load_state_dict(self.net.state_dict())
        self.log_dict({"reward": reward, "train_loss": loss})
        self.log("total_reward", self.total_reward, prog_bar=True)
        return OrderedDict({"loss": loss, "reward": torch.tensor(reward)})

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=1e-2)

    def train_dataloader(self):
        dataset = RLDataset(self.buffer, self.hparams.episode_length)
        return DataLoader(dataset=dataset, batch_size=self.hparams.batch_size, sampler=None)


@style()
def deep_q_network(job: Job) -> None:
    lightning.seed_everything(1, verbose=False)
    job.fit(DQNLightning())
